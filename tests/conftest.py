"""For all tests: none of them fails because the machine is slow, or asks a proxy for what it serves itself."""

import os
from contextlib import suppress

for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))

with suppress(ImportError):  # not where a served model is tested
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
