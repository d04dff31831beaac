"""A slice sees the environment of its target rank, and nothing of the physical launch."""

import pytest

from prism_plugins.program.slices import GpuFacts, SliceSpec
from prism_plugins.slice_env import HASH_SEED_CHOSEN, slice_environment


def spec(rank, world_size=64, **changes):
    gpu = GpuFacts(name="H100", memory_bytes=1, num_sms=1, capability=(9, 0))
    return SliceSpec(
        rank=rank, world_size=world_size, gpus_per_node=8, argv=("t.py",), gpu=gpu, slice_dir="/x", **changes
    )


def test_as_torchrun_gives_it():
    env = slice_environment(spec(21), {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    expected = {
        "RANK": "21",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "64",
        "LOCAL_WORLD_SIZE": "8",
        "NODE_RANK": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "8",
        "ROLE_RANK": "21",
        "ROLE_WORLD_SIZE": "64",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PRISM_SLICE": "21",
    }
    assert env | expected == env


def test_a_world_smaller_than_a_node():
    env = slice_environment(spec(1, world_size=2), {})
    assert (env["LOCAL_WORLD_SIZE"], env["LOCAL_RANK"], env["GROUP_WORLD_SIZE"]) == ("2", "1", "1")
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_the_physical_launch_and_the_options_are_hidden():
    base = {
        "SLURM_JOB_NODELIST": "node[0-7]",
        "OMPI_MCA_x": "1",
        "TORCHELASTIC_ERROR_FILE": "/x",
        "PRISM_EMULATE": "1",
        "PRISM_WORLD_SIZE": "64",
        "HOME": "/home/me",
    }
    env = slice_environment(spec(0), base)
    assert env["HOME"] == "/home/me"
    assert not {k for k in base if k != "HOME"} & set(env)


def test_a_scheduler_says_who_the_slice_is_where_it_said_who_the_launched_process_was():
    base = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    base |= {"CROSS_RANK": "0", "LOCAL_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    env = slice_environment(spec(21), base)
    expected = {"SLURM_PROCID": "21", "SLURM_LOCALID": "5", "SLURM_NTASKS": "64", "SLURM_NNODES": "8"}
    expected |= {"CROSS_RANK": "2", "LOCAL_SIZE": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert env | expected == env
    assert "SLURM_NODEID" not in env


@pytest.mark.parametrize("store", ["10.0.0.1:4321"])
def test_real_ranks_meet_at_their_store(store):
    env = slice_environment(spec(0, store=store), {"MASTER_ADDR": "node0", "MASTER_PORT": "1"})
    assert f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" == store


def test_sets_of_strings_have_the_same_order_in_every_slice():
    for base in ({}, {"PYTHONHASHSEED": "random"}):
        env = slice_environment(spec(3), base)
        assert (env["PYTHONHASHSEED"], env[HASH_SEED_CHOSEN]) == ("0", "1")
    env = slice_environment(spec(3), {"PYTHONHASHSEED": "7"})
    assert env["PYTHONHASHSEED"] == "7"
    assert HASH_SEED_CHOSEN not in env
