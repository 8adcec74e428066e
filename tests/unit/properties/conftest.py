"""Properties are checked on the same drawn cases every time, however slow the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "properties",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("properties")
