"""Presets of memory settings, and where the size of the machine comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tailrace.cli import expand_flags
from tailrace.common import memory
from tailrace.common.limits import MIB, Limits
from tailrace.common.settings import SettingsError
from tailrace.common.settings_loading import load_settings, unknown_variable_warnings


@pytest.mark.parametrize(
    ("size", "preset"), [("256", 256), ("511", 256), ("512", 512), ("5000", 4096), ("99999", 8192)]
)
def test_the_largest_preset_that_fits(tmp_path: Path, size: str, preset: int) -> None:
    settings = load_settings({"auto_tune": size}, {}, tmp_path)
    limits = settings.limits
    assert settings.auto_tune == size
    assert limits.memory_limit_bytes == preset * MIB
    assert limits.tail_memory_max_bytes == preset * MIB // 8
    assert limits.tail_index_max_bytes == preset * MIB // 8
    assert limits.search_concurrency == min(preset // 256, 2 * (os.cpu_count() or 1))
    assert limits.segment_cache_max_bytes == preset * MIB
    assert limits.sqlite_cache_bytes == preset * MIB // 16
    assert limits.search_companion_file_cache_max_bytes == preset * MIB // 2
    assert limits.pipeline_heap in (512 * MIB, 1024 * MIB, preset * MIB // 2)
    assert limits.append_queue_max_bytes == min(preset // 16, 256) * MIB
    assert limits.append_queue_stream_bytes >= limits.append_body_bytes


def test_yes_takes_what_the_machine_has(tmp_path: Path) -> None:
    settings = load_settings({"auto_tune": "yes"}, {}, tmp_path)
    assert int(settings.auto_tune) == memory.available_memory_bytes() // MIB


@pytest.mark.parametrize("word", ["", "no", "off", "0"])
def test_off_changes_nothing(tmp_path: Path, word: str) -> None:
    assert load_settings({"auto_tune": word}, {}, tmp_path).limits == Limits()


@pytest.mark.parametrize("word", ["255", "1", "many", "-5", "1.5"])
def test_sizes_that_are_none(tmp_path: Path, word: str) -> None:
    with pytest.raises(SettingsError, match="--auto-tune"):
        load_settings({"auto_tune": word}, {}, tmp_path)


@pytest.mark.parametrize(
    "name", [*memory.TUNED_SETTINGS_MB, "append_queue_stream_bytes", "search_concurrency"]
)
def test_no_tuned_setting_may_be_given_as_well(tmp_path: Path, name: str) -> None:
    variable = f"TAILRACE_{name.upper()}"
    with pytest.raises(SettingsError, match=f"{variable} cannot be combined with --auto-tune"):
        load_settings({"auto_tune": "512"}, {variable: "12345678"}, tmp_path)


def test_the_flag_may_stand_alone() -> None:
    assert expand_flags(["serve", "--auto-tune"]) == ["serve", "--auto-tune=yes"]
    assert expand_flags(["serve", "--auto-tune", "--port", "1"])[1] == "--auto-tune=yes"
    assert expand_flags(["serve", "--auto-tune", "512"]) == ["serve", "--auto-tune", "512"]
    assert expand_flags(["serve", "--auto-tune=512"]) == ["serve", "--auto-tune=512"]


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/mine\n")
    (tmp_path / "mine").mkdir()
    assert memory.cgroup_memory_limit_bytes(tmp_path, own) is None
    (tmp_path / "mine" / "memory.max").write_text("max\n")
    assert memory.cgroup_memory_limit_bytes(tmp_path, own) is None
    (tmp_path / "mine" / "memory.max").write_text("536870912\n")
    assert memory.cgroup_memory_limit_bytes(tmp_path, own) == 512 * MIB
    own.write_text("4:cpu,memory:/not-mounted\n1:pids:/x\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1073741824\n")
    assert memory.cgroup_memory_limit_bytes(tmp_path, own) == 1024 * MIB


def test_variables_that_are_no_settings() -> None:
    env = {"TAILRACE_PORT": "1", "TAILRACE_TOKEN": "t", "TAILRACE_WRONG_THING": "", "HOME": "/"}
    env["TAILRACE_PIPELINE_PATH_REWRITE"] = "s3://=s3a://"  # which Spark reads
    assert unknown_variable_warnings(env) == ["TAILRACE_WRONG_THING is not a setting"]
