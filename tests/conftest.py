"""For all tests: none of them fails because the machine is slow."""

from contextlib import suppress

with suppress(ImportError):  # not where a served model is tested
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
