"""Which of a benchmark's figures the table shows."""

from proof.readings import Figure


def loss_figures(method: str) -> tuple[Figure, ...]:
    """Of `train.cross_entropy=method`."""
    of = {"impl": method}
    return (
        Figure(name="ms", key="seconds", where=of, unit=1e-3),
        Figure(name="mfu", key="mfu", where=of, optional=True),
        Figure(name="peak_gb", key="peak_bytes", where=of, unit=1e9),
        Figure(name="time_to_whole_logits", key="seconds_to_eager", where=of),
        Figure(name="memory_to_whole_logits", key="peak_to_eager", where=of),
    )


STEP_FIGURES = (
    Figure(name="seconds", key="seconds", where={"acceptance": 1.0}),
    Figure(name="tokens_per_second", key="tokens_per_second", where={"acceptance": 1.0}),
    Figure(name="mfu", key="mfu", where={"acceptance": 1.0}, optional=True),
    Figure(name="peak_gb", key="peak_bytes", where={"acceptance": 1.0}, unit=1e9),
    Figure(
        name="quarter_accepted_to_all", key="seconds_to_all_accepted", where={"acceptance": 0.25}
    ),
)
PUSH_FIGURES = (
    Figure(name="gb_per_second", key="in_place_gb_per_second"),
    Figure(name="copy_gb_per_second", key="copy_gb_per_second"),
    Figure(name="share_of_copy", key="in_place_to_copy"),
    Figure(name="checksums_seconds", key="checksums_seconds"),
)
CONVERT_FIGURES = (
    Figure(name="to_megatron_seconds", key="to_megatron_seconds"),
    Figure(name="to_hf_seconds", key="to_hf_seconds"),
    Figure(name="peak_rss_mb", key="peak_rss_mb"),
)
SAVE_FIGURES = (
    Figure(name="stall_seconds", key="stall_seconds"),
    Figure(name="at_once_seconds", key="at_once_seconds"),
    Figure(name="mib", key="checkpoint_mib"),
)
