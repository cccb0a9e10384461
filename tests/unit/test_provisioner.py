import stat
import subprocess
import sys

import pytest

from forge import provisioner
from forge.placement import InsufficientResources, Request, check_gpus, threads_per_process
from forge.provisioner import Provisioner, available_gpus


def gpu(service, procs=1, num_replicas=1):
    return Request(service=service, procs=procs, num_replicas=num_replicas, with_gpus=True)


@pytest.fixture
def machine_with(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` on the path that lists so many GPUs."""

    def install(count):
        tool = tmp_path / "nvidia-smi"
        lines = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}{i})" for i in range(count))
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\n")
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_the_sum_of_gpus_may_be_exactly_what_there_is():
    check_gpus([gpu("trainer", procs=2), gpu("generator", num_replicas=2), Request(service="reward")], 4)


def test_too_many_gpus_names_each_service_both_numbers_and_the_two_ways_out():
    requests = [gpu("trainer", procs=2), gpu("generator", procs=2, num_replicas=2), gpu("ref_model")]
    with pytest.raises(InsufficientResources) as info:
        check_gpus(requests, 4)
    message = str(info.value)
    assert message.startswith("Insufficient GPU resources: 7 GPUs needed, 4 available.")
    assert "trainer    2 = 1 replica × 2 processes" in message
    assert "generator  4 = 2 replicas × 2 processes" in message
    assert "ref_model  1 = 1 replica × 1 process" in message
    assert "services.ref_model: null" in message
    assert "ref_model.with_gpus: false" in message


def test_without_a_reference_model_other_ways_out_are_offered():
    with pytest.raises(InsufficientResources, match="1 GPU needed, 0 available") as info:
        check_gpus([gpu("trainer")], 0)
    assert "ref_model" not in str(info.value)
    assert "with_gpus: false" in str(info.value)


def test_two_cores_give_each_heavy_process_one_thread():
    requests = [Request(service="trainer"), Request(service="generator"), Request(service="reward", heavy=False)]
    assert threads_per_process(2, requests) == {"trainer": 1, "generator": 1, "reward": 1}


def test_cores_are_shared_among_the_processes_that_compute():
    requests = [
        Request(service="trainer", procs=2),
        Request(service="generator", num_replicas=2),
        Request(service="reward", num_replicas=4, heavy=False),
    ]
    assert threads_per_process(32, requests) == {"trainer": 8, "generator": 8, "reward": 1}


def test_what_takes_idle_cores_gets_all_of_them_and_leaves_the_others_their_share():
    generator = Request(service="generator", num_replicas=2, takes_idle_cores=True)
    assert threads_per_process(16, [Request(service="trainer"), generator]) == {"trainer": 5, "generator": 8}
    assert threads_per_process(1, [Request(service="trainer"), generator]) == {"trainer": 1, "generator": 1}


def test_explicit_threads_win_and_leave_the_rest_to_the_others():
    requests = [Request(service="trainer", threads=6), Request(service="generator", num_replicas=2)]
    assert threads_per_process(16, requests) == {"trainer": 6, "generator": 5}


def test_a_process_on_a_gpu_gets_at_most_eight_threads():
    assert threads_per_process(192, [gpu("trainer", procs=4), gpu("generator")]) == {"trainer": 8, "generator": 8}


def test_more_processes_than_cores_still_get_a_thread_each():
    assert threads_per_process(2, [Request(service="trainer", procs=8, threads=None)]) == {"trainer": 1}


def test_all_gpus_of_the_machine_are_available_when_none_is_named(machine_with):
    machine_with(3)
    assert available_gpus({}) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        ("1,7", ["1"]),  # there is no GPU 7
        ("1,-1,2", ["1"]),  # CUDA stops at the first entry that is no device
        ("0,0", ["0"]),
        ("GPU-8932f937, GPU-f0d3", ["GPU-8932f937", "GPU-f0d3"]),
    ],
)
def test_cuda_visible_devices_is_respected(machine_with, visible, expected):
    machine_with(4)
    assert available_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_a_machine_without_driver_tools_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert available_gpus({}) == []
    assert available_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_a_broken_driver_tool_means_no_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert available_gpus({}) == []


def test_the_plan_checks_gpus_before_anything_else():
    with pytest.raises(InsufficientResources):
        Provisioner(cores=8, gpus=["0"]).plan([gpu("trainer", procs=2)])


def test_gpus_are_handed_out_once_each():
    plant = Provisioner(cores=8, gpus=["4", "5", "6"])
    assert [slot.gpus for slot in plant._take("trainer", 0, 2, None)] == [["4", "5"]]
    assert [slot.gpus for slot in plant._take("generator", 0, 1, None)] == [["6"]]
    with pytest.raises(InsufficientResources, match="1 GPU needed, 0 available"):
        plant._take("ref_model", 0, 1, None)


def test_a_childs_module_path_has_this_process_own_folders_and_not_the_installed_ones(tmp_path):
    installed = [
        p for p in sys.path if p.endswith(("site-packages", f"python3.{sys.version_info.minor}", "lib-dynload"))
    ]
    assert len(installed) >= 3
    search_path = [str(tmp_path), *installed, str(tmp_path), "/does/not/exist"]
    assert provisioner.python_path(search_path) == str(tmp_path.resolve())


def test_importing_the_provisioner_starts_neither_monarch_nor_torch():
    code = "import sys, forge.provisioner; print([m for m in ('torch', 'monarch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
