"""How long tests wait: a loaded machine must not change what is found, only when.

In: nothing. Out: deadlines for a tier, as settings and as variables of an environment. Imported, it lets connectors of
this process wait as long for their memory and their tiers when they start. Never: a wait.
"""

from __future__ import annotations

from orlop import connector

PATIENT = {"lookup": "60s", "promotion": "60s", "cascade": "120s"}
"""The deadlines of a tier."""

PATIENT_ENVIRON = {"ORLOP_DRAIN_DEADLINE": "60s", "ORLOP_STORE_DEADLINE": "120s"} | {
    f"ORLOP_TIERS_0_DEADLINE_{name.upper()}": limit for name, limit in PATIENT.items()
}
"""For a process that has a tier."""

connector.TIER_START_TIMEOUT_S = connector.MEMORY_START_TIMEOUT_S = connector.COUNT_TIMEOUT_S = 60.0
