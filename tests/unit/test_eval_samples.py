"""Samples on disk: nothing stored is lost, torn lines are, and the same samples give one file."""

import gzip
from pathlib import Path

from eval_samples import stored

from megatron_opsft.evaluate.benchmarks import SampleFiles, StoredSample


def sample(problem: str, index: int) -> StoredSample:
    return stored(problem, index, 12, correct=True)


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    one, other = SampleFiles(tmp_path), SampleFiles(tmp_path)
    one.append("a", [sample("q", 1), sample("p", 2)])
    other.append("a", [sample("p", 0)])
    other.append("a.b", [sample("z", 0)])
    assert [(s.problem_id, s.sample_index) for s in one.read("a")] == [("p", 0), ("p", 2), ("q", 1)]
    assert one.read("a")[0] == sample("p", 0)
    assert [s.problem_id for s in one.read("a.b")] == ["z"]
    assert one.read("b") == []


def test_a_torn_last_line_is_sampled_again(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    files.append("a", [sample("p", 0), sample("p", 1)])
    (part,) = (tmp_path / "samples/parts").iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    kept = [s.sample_index for s in SampleFiles(tmp_path).read("a")]
    assert kept == [0]


def test_one_file_in_the_end_whoever_wrote_the_parts(tmp_path: Path) -> None:
    samples = [sample(f"p{i % 3}", i // 3) for i in range(12)]
    for name, order, cut in (("x", samples, 5), ("y", samples[::-1], 8)):
        for part in (order[:cut], order[cut:], order[:2]):  # some are there twice
            files = SampleFiles(tmp_path / name)
            files.append("a", part)
        SampleFiles(tmp_path / name).combine("a")
        assert not (tmp_path / name / "samples/parts").exists()
        assert len(SampleFiles(tmp_path / name).read("a")) == 12
    one, other = ((tmp_path / name / "samples/a.jsonl.gz").read_bytes() for name in "xy")
    assert one == other
    assert len(gzip.decompress(one).splitlines()) == 12


def test_a_kill_while_parts_are_combined_loses_nothing(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path)
    files.append("a", [sample("p", 0)])
    SampleFiles(tmp_path).append("a", [sample("p", 1)])
    parts = {path: path.read_bytes() for path in (tmp_path / "samples/parts").iterdir()}
    SampleFiles(tmp_path).combine("a")
    whole = (tmp_path / "samples/a.jsonl.gz").read_bytes()
    (tmp_path / "samples/parts").mkdir()
    for path, data in list(parts.items())[:1]:  # killed after one part was removed
        path.write_bytes(data)
    later = SampleFiles(tmp_path)
    later.append("a", [sample("p", 2)])
    SampleFiles(tmp_path).combine("a")
    assert [s.sample_index for s in later.read("a")] == [0, 1, 2]
    assert (tmp_path / "samples/a.jsonl.gz").read_bytes() != whole
