"""Every rule of the config, with the key, the value and the fix that its message names."""

import pickle

import pytest

from forge.config import ConfigError, GRPOConfig, exit_on_user_error, load_config
from forge.types import UserError

# overrides → key, value as shown, rule, fix
WRONG_NUMBERS = [
    ("training.steps=0", "must be at least 1"),
    ("training.batch_size=0", "must be at least 1"),
    ("training.gradient_accumulation_steps=-1", "must be at least 1"),
    ("training.learning_rate=0.0", "must be above 0"),
    ("training.learning_rate=.nan", "must be a finite number"),
    ("training.learning_rate=1e999", "must be a finite number"),
    ("training.max_norm=0.0", "must be above 0"),
    ("training.warmup_steps=-1", "must be at least 0"),
    ("training.weight_decay=-0.1", "must be at least 0"),
    ("training.seq_len=0", "must be at least 1"),
    ("training.sync_interval=0", "must be at least 1"),
    ("training.max_staleness=-1", "must be at least 0"),
    ("training.entropy_coef=-0.1", "must be at least 0"),
    ("grpo.n_samples=1", "must be at least 2"),
    ("grpo.clip_low=1.0", "must be at least 0 and below 1"),
    ("grpo.clip_low=-0.1", "must be at least 0 and below 1"),
    ("grpo.clip_high=-0.1", "must be at least 0"),
    ("grpo.beta=-0.1", "must be at least 0"),
    ("grpo.temperature=0.0", "must be above 0"),
    ("grpo.top_p=0.0", "must be above 0 and at most 1"),
    ("grpo.top_p=1.1", "must be above 0 and at most 1"),
    ("grpo.max_new_tokens=0", "must be at least 1"),
    ("grpo.max_error_fraction=1.5", "must be at least 0 and at most 1"),
    ("parallelism.tensor_parallel_degree=0", "must be at least 1"),
    ("parallelism.data_parallel_shard_degree=-2", "must be at least -1"),
    ("services.generator.procs=0", "must be at least 1"),
    ("services.generator.gpu_memory_utilization=0.0", "must be above 0 and at most 1"),
    ("eval.interval=0", "must be at least 1"),
    ("eval.samples=-1", "must be at least 0"),
    ("checkpoint.interval=0", "must be at least 1"),
    ("checkpoint.keep_latest_k=0", "must be at least 1"),
    ("lora.rank=0", "must be at least 1"),
    ("lora.alpha=0.0", "must be above 0"),
    ("lora.dropout=1.0", "must be at least 0 and below 1"),
]
WRONG_TYPES = [
    ("training.steps=ten", '"ten"', "int at least 1", "write a number"),
    ("training.steps=10.0", "10.0", "int at least 1", "write a whole number, such as 10"),
    ("training.steps=true", "true", "int at least 1", "write int"),
    ("training.steps=null", "null", "int at least 1", "write int"),
    ("training.steps='\"10\"'", '"\\"10\\""', "int at least 1", "write a number, without quotes"),
    ("training.learning_rate=fast", '"fast"', "float above 0", "write a number"),
    ("training.learning_rate=[1]", "[1]", "float above 0", "write float"),
    ("training.dtype=bf16", '"bf16"', "auto|bfloat16|float32", "did you mean bfloat16?"),
    ("grpo.advantage=gae", '"gae"', "grpo|dr_grpo|rloo", "--grpo.advantage grpo"),
    ("launcher=slrum", '"slrum"', "local|hosts|slurm", "did you mean slurm?"),
    ("checkpoint.resume=always", '"always"', "auto|never", "--checkpoint.resume auto"),
    ("dataset.streaming=1", "1", "bool", "write true or false"),
    ("metrics.wandb=on_line", '"on_line"', "bool or online|offline", "did you mean online?"),
    (
        "services.ref_model=3",
        "3",
        "{procs, num_replicas, with_gpus, hosts, threads} or null",
        "services.ref_model.procs",
    ),
    ("dataset.parameters=[1]", "[1]", "mapping", "write mapping"),
    ("lora.target_modules=[query]", '"query"', "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj", ""),
    ("hosts=[1]", "1", "str", 'put it in quotes: "1"'),
]
CROSS = [
    # overrides, key, value, part of the message, part of the fix
    (
        ["training.warmup_steps=101"],
        "training.warmup_steps",
        101,
        "at most training.steps = 100",
        "--training.warmup_steps 10",
    ),
    (
        ["training.max_tokens_per_microbatch=1000"],
        "training.max_tokens_per_microbatch",
        1000,
        "at least training.seq_len = 2048",
        "--training.max_tokens_per_microbatch 2048",
    ),
    (
        ["training.sync_interval=10", "training.max_staleness=8"],
        "training.max_staleness",
        8,
        "at least training.sync_interval - 1 = 9, got 8: with a weight sync every 10 steps, weights are up to 9 steps",
        "--training.max_staleness 9, or --training.sync_interval 9",
    ),
    (
        ["grpo.max_new_tokens=2048"],
        "grpo.max_new_tokens",
        2048,
        "must be below training.seq_len = 2048",
        "--grpo.max_new_tokens 1024, or --training.seq_len 4096",
    ),
    (
        ["eval.max_new_tokens=4096"],
        "eval.max_new_tokens",
        4096,
        "below training.seq_len = 2048",
        "--eval.max_new_tokens 1024",
    ),
    (
        ["grpo.overlong_buffer=64", "grpo.max_new_tokens=64"],
        "grpo.overlong_buffer",
        64,
        "must be below grpo.max_new_tokens = 64",
        "--grpo.overlong_buffer 16",
    ),
    (
        ["grpo.overlong_buffer=64"],
        "grpo.overlong_buffer",
        64,
        "needs grpo.max_new_tokens",
        "--grpo.max_new_tokens 1024",
    ),
    (["loss=dapoo"], "loss", "dapoo", "must be one of simple_grpo, grpo, dr_grpo, dapo,", "did you mean dapo?"),
    (["loss=xyz"], "loss", "xyz", "or the import path of a class", "--loss grpo"),
    (["loss=gspo", "grpo.clip_low=0.2"], "grpo.clip_low", 0.2, "below 0.1 with loss: gspo", "--grpo.clip_low null"),
    (["loss=gspo", "grpo.clip_high=0.1"], "grpo.clip_high", 0.1, "below 0.1 with loss: gspo", "4e-4"),
    (
        ["loss.args.clip_low=0.1", "grpo.clip_low=0.2"],
        "loss.args.clip_low",
        0.1,
        "together with grpo.clip_low = 0.2",
        "remove loss.args.clip_low",
    ),
    (
        ["loss.args.beta=0.2", "grpo.beta=0.1"],
        "loss.args.beta",
        0.2,
        "contradict grpo.beta = 0.1",
        "remove loss.args.beta",
    ),
    (["loss.args.beta=a"], "loss.args.beta", "a", "must be a number at least 0", "--loss.args.beta 0.1"),
    (["rewards=[]"], "rewards", [], "at least one reward", "forge.data.rewards.MathReward"),
    (
        ["rewards=[MathReward]"],
        "rewards.0.reward",
        "MathReward",
        "must be an import path",
        "my_rewards.CustomMathReward",
    ),
    (["model=' '"], "model", " ", "must not be empty", "--model FOLDER_OR_HUB_ID"),
    (
        ["dataset.prompt_template=Solve"],
        "dataset.prompt_template",
        "Solve",
        "must contain {prompt}",
        "write {prompt} where the question belongs",
    ),
    (["lora.target_modules=[]"], "lora.target_modules", [], "nothing would be trained", "target_modules null"),
    (["lora.dropout=0.1"], "lora.dropout", 0.1, "not be the one that sampled", "--lora.dropout 0"),
    (["launcher=hosts"], "hosts", [], "must name the machines", "--hosts '[node1, node2]'"),
    (
        ["generator.hosts=2"],
        "services.generator.hosts",
        2,
        "must be 1 with launcher: local",
        "--launcher slurm, --launcher hosts, or --generator.hosts 1",
    ),
    (
        ["generator.colocate=true"],
        "services.generator.colocate",
        True,
        "needs training.max_staleness 0",
        "--training.max_staleness 0, or --generator.colocate false",
    ),
    (
        ["generator.colocate=true", "training.max_staleness=0", "generator.with_gpus=false"],
        "services.generator.colocate",
        True,
        "the trainer is on GPUs, the generator is not",
        "--generator.colocate false",
    ),
    (
        ["weights.transport=shm", "launcher=slurm"],
        "weights.transport",
        "shm",
        "must be auto, rdma or tcp with launcher: slurm",
        "--weights.transport auto",
    ),
    (
        ["trainer.num_replicas=2"],
        "services.trainer.num_replicas",
        2,
        "must be 1",
        "--trainer.procs 2 --parallelism.data_parallel_replicate_degree 2",
    ),
]
PARALLEL = [
    # degrees and processes → arithmetic and fix
    ("tp=2 dp_shard=2 procs=2", "2×1×2 = 4 trainer processes, and 2 are", "--trainer.procs 4"),
    ("tp=2 dp_shard=1 procs=1", "2×1×1 = 2", "--trainer.procs 2"),
    ("dp_shard=2 procs=4", "1×1×2 = 2", "--trainer.procs 2, or --parallelism.data_parallel_shard_degree 4"),
    (
        "dp_shard=2 dp_replicate=2 pp=2 procs=4",
        "1×2×2×2 = 8",
        "--trainer.procs 8, or --parallelism.data_parallel_shard_degree 1",
    ),
    ("dp_shard=6 procs=2 hosts=2", "2×2 = 4 (procs × hosts)", "--trainer.procs 3"),
    ("dp_shard=3 procs=1 hosts=2", "1×2 = 2 (procs × hosts)", "--trainer.procs 3 --trainer.hosts 1"),
    (
        "tp=3 procs=4",
        "tensor_parallel_degree 3 × pipeline_parallel_degree 1: 3×1 = 3, and 4 configured",
        "--trainer.procs 6",
    ),
    ("dp_shard=0", "must be at least 1, or -1", "--parallelism.data_parallel_shard_degree -1"),
    ("pp=2 procs=2 hosts=2 dp_shard=1", "1×2×1 = 2 trainer processes, and 2×2 = 4", "--trainer.procs 1"),
    (
        "cp=2 procs=2",
        "must be 1, got 2: attention over shared prompts needs",
        "--parallelism.context_parallel_degree 1",
    ),
    ("ep=2 procs=2", "must be 1, got 2: the supported architectures", "--parallelism.expert_parallel_degree 1"),
]
SHORT = {
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "procs": "trainer.procs",
    "hosts": "trainer.hosts",
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: toy\n")
    return lambda *overrides: load_config(GRPOConfig, path, overrides)


def problem_of(load, *overrides):
    """The only problem that these overrides make."""
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert len(error.value.problems) == 1, str(error.value)
    return error.value.problems[0]


@pytest.mark.parametrize(("override", "rule"), WRONG_NUMBERS)
def test_number_out_of_bounds_names_key_value_and_bound(load, override, rule):
    key, value = override.split("=")
    problem = problem_of(load, override)
    assert problem.key == key
    assert problem.rule == rule
    assert float(problem.value) == float(value.replace(".nan", "nan")) or value == ".nan"
    assert problem.fix.startswith(f"set {key} to ")


@pytest.mark.parametrize(("override", "shown", "wanted", "fix"), WRONG_TYPES)
def test_wrong_type_names_key_value_type_and_fix(load, override, shown, wanted, fix):
    problem = problem_of(load, override)
    assert problem.key.startswith(override.split("=")[0])
    assert f"{problem.key} must be {wanted}" in str(problem)
    assert f", got {shown}" in str(problem)
    assert fix in problem.fix


@pytest.mark.parametrize(("overrides", "key", "value", "message", "fix"), CROSS, ids=lambda x: str(x)[:40])
def test_numbers_that_do_not_fit_together_are_told(load, overrides, key, value, message, fix):
    problem = problem_of(load, *overrides)
    assert (problem.key, problem.value) == (key, value)
    assert message in str(problem)
    assert fix in problem.fix


@pytest.mark.parametrize(("settings", "arithmetic", "fix"), PARALLEL, ids=lambda x: str(x)[:50])
def test_parallel_degrees_that_do_not_give_the_processes_print_the_arithmetic(load, settings, arithmetic, fix):
    pairs = [setting.split("=") for setting in settings.split()]
    overrides = [f"{SHORT[name]}={number}" for name, number in pairs]
    problem = problem_of(load, "launcher=slurm", "training.batch_size=64", *overrides)
    assert arithmetic in str(problem)
    assert fix in problem.fix


@pytest.mark.parametrize(
    "settings",
    [
        ("trainer.procs=4",),
        ("trainer.procs=4", "parallelism.tensor_parallel_degree=2"),
        ("trainer.procs=4", "parallelism.tensor_parallel_degree=2", "parallelism.data_parallel_shard_degree=2"),
        ("trainer.procs=2", "trainer.hosts=2", "launcher=slurm", "parallelism.data_parallel_shard_degree=4"),
        ("trainer.procs=4", "parallelism.pipeline_parallel_degree=2"),
        ("trainer.procs=2", "trainer.hosts=2", "launcher=slurm", "parallelism.pipeline_parallel_degree=4"),
    ],
)
def test_parallel_degrees_that_give_the_processes_are_accepted(load, settings):
    load(*settings)


@pytest.mark.parametrize(
    ("settings", "gpus", "colocated"),
    [
        ("max_staleness=0 with_gpus=true", 1, True),
        ("max_staleness=0 with_gpus=true", 2, False),
        ("max_staleness=0 with_gpus=false", 0, True),
        ("max_staleness=0 with_gpus=false", 8, True),
        ("max_staleness=1 with_gpus=false", 0, False),
        ("max_staleness=0 with_gpus=false colocate=false", 0, False),
        ("max_staleness=0 with_gpus=true colocate=true", 8, True),
    ],
)
def test_on_one_device_a_strictly_on_policy_run_takes_turns(load, settings, gpus, colocated):
    short = {"max_staleness": ["training.max_staleness"], "colocate": ["generator.colocate"]}
    short["with_gpus"] = ["trainer.with_gpus", "generator.with_gpus"]
    pairs = [setting.split("=") for setting in settings.split()]
    config = load(*(f"{key}={value}" for name, value in pairs for key in short[name]))
    assert config.colocated(gpus) is colocated


def test_every_data_parallel_rank_needs_a_prompt(load):
    # 8 processes, 2 of them for one tensor-parallel model: 4 ranks; 1 prompt × 2 accumulation steps = 2.
    overrides = ["trainer.procs=8", "parallelism.tensor_parallel_degree=2", "training.gradient_accumulation_steps=2"]
    problem = problem_of(load, *overrides, "training.batch_size=1")
    assert problem.key == "training.batch_size"
    assert "1×2 = 2 prompts a step leave some of the 4 data-parallel ranks without one" in str(problem)
    assert "--training.batch_size 2," in problem.fix
    load(*overrides, "training.batch_size=2")


@pytest.mark.parametrize(
    "settings",
    [
        ("training.warmup_steps=100",),
        ("training.sync_interval=10", "training.max_staleness=9"),
        ("training.max_staleness=0",),
        ("grpo.max_new_tokens=2047",),
        ("grpo.overlong_buffer=63", "grpo.max_new_tokens=64"),
        ("loss=gspo", "grpo.clip_low=0.0003"),
        ("loss=my.losses.Loss",),
        ("loss.args.beta=0.1", "grpo.beta=0.1"),
        ("launcher=hosts", "hosts=[a]", "generator.hosts=2"),
        ("grpo.n_samples=2",),
    ],
    ids=" ".join,
)
def test_values_on_the_edge_of_a_rule_are_accepted(load, settings):
    load(*settings)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("n_samples", "grpo.n_samples"),
        ("training.n_samples", "grpo.n_samples"),
        ("grpo.nsamples", "grpo.n_samples"),
        ("training.learning_rte", "training.learning_rate"),
        ("training.lr", "training.learning_rate"),
        ("grpo.kl_coef", "grpo.beta"),
        ("trainer.prcs", "services.trainer.procs"),
        ("traner.procs", "services.trainer.procs"),
        ("service.generator.procs", "services.generator.procs"),
        ("parallelism.tp", "parallelism.tensor_parallel_degree"),
        ("parallelism.tensor_parallel", "parallelism.tensor_parallel_degree"),
        ("training.batch-size", "training.batch_size"),
        ("outputdir", "output_dir"),
        ("loss.arg", "loss.args"),
        ("loss.arg.beta", "grpo.beta"),
        ("training.steps.x", "training.steps"),
        ("rewards.first.share", "--help lists every key"),
    ],
)
def test_unknown_key_suggests_the_one_that_was_meant(load, key, meant):
    problem = problem_of(load, f"{key}=3")
    assert "is not a key of the config, got" in str(problem)
    assert meant in problem.fix


def test_key_of_the_same_name_in_another_section_is_the_only_suggestion(load):
    assert problem_of(load, "n_samples=4").fix == "did you mean grpo.n_samples?"
    assert problem_of(load, "training.split=a").fix == "did you mean eval.split or dataset.split?"


def test_unknown_key_in_a_file_is_told_like_one_on_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text("model: toy\ntrainer: {procs: 2}\n")
    with pytest.raises(ConfigError, match=r"trainer is not a key .*\n.*did you mean services.trainer\?"):
        load_config(GRPOConfig, tmp_path / "c.yaml")


def test_all_problems_are_in_one_message_and_rules_wait_for_their_keys(load):
    with pytest.raises(ConfigError) as error:
        load("training.steps=0", "training.warmup_steps=200", "loss=dapoo", "n_samples=3", "grpo.top_p=2.0")
    keys = [problem.key for problem in error.value.problems]
    # warmup_steps is not judged against the steps that are wrong themselves.
    assert keys == ["n_samples", "training.steps", "grpo.top_p", "loss"]
    assert "4 problems" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (("ref_model.procs=1", "grpo.beta=0"), "services.ref_model is not started, because grpo.beta is 0"),
        (("grpo.top_p=0.9",), "grpo.top_p = 0.9 samples from a part of the vocabulary"),
        (("loss=cispo", "grpo.clip_high=0.2"), "grpo.clip_high has no effect with loss: cispo"),
        (("loss=simple_grpo",), "does not correct for old weights, and training.max_staleness is 1"),
        (("eval.interval=5", "eval.samples=0"), "eval.interval has no effect"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_probably_not_meant_is_warned_about_in_one_line(load, settings, warning):
    [line] = load(*settings).warnings()
    assert warning in line
    assert "\n" not in line


@pytest.mark.parametrize("settings", [(), ("ref_model.procs=1", "grpo.beta=0.1"), ("loss=gspo",), ("grpo.beta=0.1",)])
def test_nothing_to_warn_about(load, settings):
    assert load(*settings).warnings() == []


def test_error_survives_pickling(load):
    with pytest.raises(ConfigError) as error:
        load("grpo.n_samples=1")
    copy = pickle.loads(pickle.dumps(error.value))
    assert str(copy) == str(error.value)
    assert copy.problems == error.value.problems


def test_a_sentence_of_a_users_error_ends_the_app_with_status_2(capsys):
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise UserError("dataset.columns.prompt names no column, got q.")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: dataset.columns.prompt names no column, got q.\n"
