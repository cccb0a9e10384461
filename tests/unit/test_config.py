"""Files and command lines → configs: spellings, short names, --help, --print_config, exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge.config import ConfigError, GRPOConfig, RunConfig, ServiceConfig, load_config, make_output_dir, parse_args
from forge.config import to_yaml as dump
from forge.config.errors import show
from forge.config.fields import all_keys
from forge.config.help import field_docs, help_text

ROOT = Path(__file__).parents[2]
USERS = Path(__file__).parent / "users_configs"
SPEC = ROOT.parent / "shared" / "spec" / "configs"
USERS_FILES = sorted(path.name for path in USERS.glob("*.yaml"))
PROG = "python -m apps.grpo.main"


@pytest.fixture
def write(tmp_path):
    """Writes a config file; `model: toy` is added if the text has no model."""

    def write(text: str = "") -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text if text.startswith("model:") else f"model: toy\n{text}")
        return str(path)

    return write


def run_python(code: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=60, check=False)


APP = f"""
import sys
from forge.config import GRPOConfig, parse_args
run = parse_args(GRPOConfig, prog={PROG!r})
print("started", run.dry_run)
"""


# --- the users' files


def test_five_user_files_are_kept_and_equal_the_spec():
    assert USERS_FILES == [
        "cpu_ref_model.yaml",
        "distributed.yaml",
        "grpo_math.yaml",
        "no_ref_model.yaml",
        "troubleshooting.yaml",
    ]
    if SPEC.is_dir():
        for name in USERS_FILES:
            assert (USERS / name).read_text() == (SPEC / name).read_text()


@pytest.mark.parametrize("name", [name for name in USERS_FILES if name != "distributed.yaml"])
def test_user_file_loads_unchanged(name):
    assert load_config(GRPOConfig, USERS / name).model.startswith("Qwen/")


def test_values_of_grpo_math():
    cfg = load_config(GRPOConfig, USERS / "grpo_math.yaml")
    assert cfg.training.learning_rate == 1e-6
    assert isinstance(cfg.training.learning_rate, float)
    assert (cfg.grpo.clip_low, cfg.grpo.clip_high, cfg.grpo.beta, cfg.grpo.temperature) == (0.2, 0.28, 0.1, 0.7)
    assert (cfg.dataset.path, cfg.dataset.streaming, cfg.training.dtype) == ("openai/gsm8k", True, "bfloat16")
    assert cfg.groups_per_step == 4 * 4
    assert cfg.reference is cfg.services.ref_model


def test_distributed_is_refused_with_its_arithmetic_and_loads_with_the_suggested_fix():
    with pytest.raises(ConfigError) as error:
        load_config(GRPOConfig, USERS / "distributed.yaml")
    assert "2×1×2 = 4 trainer processes, and 2 are configured" in str(error.value)
    assert "--trainer.procs 4" in str(error.value)
    cfg = load_config(GRPOConfig, USERS / "distributed.yaml", ["--trainer.procs", "4"])
    assert (cfg.services.trainer.procs, cfg.services.generator.procs) == (4, 2)


@pytest.mark.parametrize("path", sorted((ROOT / "apps" / "grpo").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_file_loads_without_a_warning(path):
    assert load_config(GRPOConfig, path).warnings() == []


@pytest.mark.parametrize("name", ["grpo_math.yaml", "distributed.yaml"])
def test_shipped_copy_of_a_user_file_is_unchanged(name):
    assert (ROOT / "config" / name).read_text() == (USERS / name).read_text()


def test_model_folder_of_the_main_job_follows_the_cache_variable(monkeypatch):
    path = ROOT / "apps/grpo/smollm2_135m.yaml"
    monkeypatch.setenv("FORGE_CACHE", "/cache")
    assert load_config(GRPOConfig, path).model == "/cache/SmolLM2-135M-Instruct"
    monkeypatch.delenv("FORGE_CACHE")
    monkeypatch.setenv("HOME", "/home/ada")
    assert load_config(GRPOConfig, path).model == "/home/ada/.cache/forge/SmolLM2-135M-Instruct"


# --- overrides


@pytest.mark.parametrize(
    "override", [["--training.steps", "10"], ["--training.steps=10"], ["training.steps=10"]], ids=" ".join
)
def test_every_spelling_of_an_override_does_the_same(write, override):
    assert load_config(GRPOConfig, write("training: {steps: 3}"), override).training.steps == 10


@pytest.mark.parametrize("service", ["generator", "trainer", "reward", "ref_model"])
def test_service_is_named_without_its_prefix(write, service):
    cfg = load_config(GRPOConfig, write(), [f"--{service}.procs", "4"])
    assert getattr(cfg.services, service).procs == 4


def test_override_of_one_key_keeps_the_others(write):
    cfg = load_config(GRPOConfig, write("services: {trainer: {with_gpus: false}}"), ["--trainer", "{procs: 2}"])
    assert (cfg.services.trainer.procs, cfg.services.trainer.with_gpus) == (2, False)
    assert load_config(GRPOConfig, write(), ["--reward.procs", "2"]).services.reward.with_gpus is False


def test_last_override_wins(write):
    assert load_config(GRPOConfig, write(), ["training.steps=10", "--training.steps", "11"]).training.steps == 11


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("dataset.streaming=true", lambda c: c.dataset.streaming, True),
        ("training.max_norm=null", lambda c: c.training.max_norm, None),
        ("training.max_norm=None", lambda c: c.training.max_norm, None),
        ("training.learning_rate=1e-5", lambda c: c.training.learning_rate, 1e-5),
        ("training.learning_rate=1", lambda c: c.training.learning_rate, 1.0),
        ("grpo.error_reward=-1", lambda c: c.grpo.error_reward, -1.0),
        ("hosts=[a, b]", lambda c: c.hosts, ["a", "b"]),
        ("dataset.parameters={min_terms: 2}", lambda c: c.dataset.parameters, {"min_terms": 2}),
        ("dataset.parameters.min_terms=2", lambda c: c.dataset.parameters, {"min_terms": 2}),
        ("loss.args.x.y=[1, 2]", lambda c: c.loss.args, {"x": {"y": [1, 2]}}),
        ("model=1234", lambda c: c.model, "1234"),
        ("dataset.system_prompt=Answer: {x} # now", lambda c: c.dataset.system_prompt, "Answer: {x} # now"),
        ('dataset.system_prompt="a\\nb"', lambda c: c.dataset.system_prompt, "a\nb"),
        ("dataset.system_prompt=a=b", lambda c: c.dataset.system_prompt, "a=b"),
        ("metrics.wandb=offline", lambda c: c.metrics.wandb, "offline"),
        ("metrics.wandb=true", lambda c: c.metrics.wandb, True),
        ("services.ref_model={}", lambda c: c.services.ref_model, ServiceConfig()),
    ],
)
def test_value_on_the_command_line_is_read_as_yaml_and_text_as_it_stands(write, override, read, value):
    result = read(load_config(GRPOConfig, write(), [override]))
    assert result == value
    assert type(result) is type(value)


def test_negative_value_may_stand_apart_from_its_key(write):
    assert load_config(GRPOConfig, write(), ["--grpo.error_reward", "-1"]).grpo.error_reward == -1.0


def test_loss_and_rewards_may_be_text_or_sections(write):
    cfg = load_config(GRPOConfig, write("loss: cispo\nrewards: [a.B, {reward: c.D, weight: 2}]"))
    assert (cfg.loss.name, cfg.loss.args) == ("cispo", {})
    assert [(r.reward, r.weight) for r in cfg.rewards] == [("a.B", 1.0), ("c.D", 2.0)]
    cfg = load_config(GRPOConfig, write("loss: cispo\nrewards: [a.B]"), ["loss.args.ratio_max=3", "rewards.0.weight=2"])
    assert (cfg.loss.name, cfg.loss.args) == ("cispo", {"ratio_max": 3})
    assert [(r.reward, r.weight) for r in cfg.rewards] == [("a.B", 2.0)]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        ("training: 3", "training.steps=5", "training cannot take training.steps from the command line, got 3"),
        ("dataset: {parameters: {a: 1}}", "dataset.parameters.a.b=2", "give dataset.parameters.a as a whole"),
        ("services: {trainer: '${services.reward}'}", "trainer.procs=2", "give services.trainer as a whole"),
        ("rewards: [a.B]", "rewards.2.weight=2", "rewards.2 is beyond the list, which has 1"),
        ("", "rewards.0.weight=2", "rewards.0.reward is missing"),
        ("", "rewards.99999999999.weight=2", "rewards.99999999999 is beyond the list, which has 0"),
    ],
)
def test_override_below_what_has_no_such_place_is_told(write, text, override, message):
    with pytest.raises(ConfigError) as error:
        load_config(GRPOConfig, write(text), [override])
    assert message in str(error.value)


def test_override_may_add_one_item_to_a_list(write):
    cfg = load_config(GRPOConfig, write("rewards: [a.B]"), ["rewards.1=c.D"])
    assert [r.reward for r in cfg.rewards] == ["a.B", "c.D"]


def test_interpolation_refers_to_other_keys_and_the_environment(write, monkeypatch):
    monkeypatch.setenv("WHO", "ada")
    text = "training: {max_tokens_per_microbatch: '${training.seq_len}'}\noutput_dir: r/${oc.env:WHO}"
    cfg = load_config(GRPOConfig, write(text), ["training.seq_len=256"])
    assert cfg.training.max_tokens_per_microbatch == 256
    assert load_config(GRPOConfig, write(text)).training.max_tokens_per_microbatch == 2048  # the default of seq_len
    assert cfg.output_dir == "r/ada"


def test_home_is_filled_in_where_a_path_stands(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    cfg = load_config(GRPOConfig, write("model: ~/m\ndataset: {path: ~/d, system_prompt: ~/x}\noutput_dir: ~/o"))
    assert (cfg.model, cfg.dataset.path, cfg.output_dir) == ("/home/ada/m", "/home/ada/d", "/home/ada/o")
    assert cfg.dataset.system_prompt == "~/x"


def test_section_whose_lines_are_all_commented_out_has_its_defaults(write):
    cfg = load_config(GRPOConfig, write("training:\n  # steps: 3\ndataset:\n  examples:\nservices:\n  ref_model:\n"))
    assert cfg.training.steps == 100
    assert cfg.dataset.examples == []
    assert cfg.services.ref_model is None


# --- what the config says


@pytest.mark.parametrize(
    ("text", "started"),
    [
        ("grpo: {beta: 0.1}\nservices: {ref_model: {procs: 1}}", True),
        ("services: {ref_model: {procs: 1}}", True),
        ("grpo: {beta: 0}\nservices: {ref_model: {procs: 1}}", False),
        ("grpo: {beta: 0.1}", False),
        ("grpo: {beta: 0.1}\nservices: {ref_model: null}", False),
        ("loss: {name: a.Loss, args: {beta: 0.1}}\nservices: {ref_model: {procs: 1}}", True),
    ],
)
def test_reference_model_takes_an_entry_and_a_kl_weight(write, text, started):
    assert (load_config(GRPOConfig, write(text)).reference is not None) == started


def test_staleness_bound_is_the_sync_interval_unless_it_is_given(write):
    assert load_config(GRPOConfig, write("training: {sync_interval: 3}")).training.staleness_bound == 3
    assert load_config(GRPOConfig, write("training: {max_staleness: 0}")).training.staleness_bound == 0


def test_config_is_checked_when_it_is_made_in_code():
    cfg = GRPOConfig(model="toy")
    cfg.training.steps = 0
    with pytest.raises(ConfigError, match=r"training\.steps must be at least 1, got 0"):
        GRPOConfig(model="toy", training=cfg.training)
    with pytest.raises(ConfigError, match="training must be a GRPOTrainingConfig"):
        GRPOConfig(model="toy", training={"steps": 3})


# --- --print_config


@pytest.mark.parametrize("name", [name for name in USERS_FILES if name != "distributed.yaml"])
def test_printed_config_loads_to_the_same_config(name, write, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(GRPOConfig, ["--config", str(USERS / name), "--print_config"], prog=PROG)
    assert end.value.code == 0
    assert load_config(GRPOConfig, write(capsys.readouterr().out)) == load_config(GRPOConfig, USERS / name)


@pytest.mark.parametrize(
    "text",
    ["1e-6", "null", "yes", "${x}", "\\${x}", "\\\\${x}", "a ${training.steps} b", "a: b\n\n # c", "é “q”", " ", ""],
)
def test_text_survives_printing_and_loading(write, text):
    cfg = GRPOConfig(model="toy")
    cfg.dataset.system_prompt = text
    assert load_config(GRPOConfig, write(dump(cfg))).dataset.system_prompt == text


def test_print_config_creates_nothing(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse_args(GRPOConfig, ["--config", write(), "--print_config", "--output_dir", "new/run"], prog=PROG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


# --- --help


def test_help_lists_every_key_with_type_default_and_meaning():
    text = help_text(GRPOConfig, prog=PROG)
    assert "--training.steps  int at least 1  (default 100)\n      Optimizer steps of the whole run." in text
    assert '--training.dtype  auto|bfloat16|float32  (default "auto")' in text
    assert "--services.reward.with_gpus  bool  (default false)" in text
    assert '--rewards  list of str or {reward, weight, args}  (default ["forge.data.rewards.MathReward"])' in text
    for key, hint, owner in all_keys(GRPOConfig):
        if hint.section is None:
            assert f"--{'.'.join(key)}  {hint}  (" in text
            assert field_docs(owner).get(key[-1]), f"{'.'.join(key)} has no text under it"


def test_help_answers_without_torch_or_pydantic():
    code = APP.replace(
        "run = parse_args", "import atexit\natexit.register(lambda: print(*sys.modules))\nrun = parse_args"
    )
    done = run_python(code, "--help")
    assert done.returncode == 0, done.stderr
    assert "--grpo.n_samples" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "forge.config.help" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "transformers", "vllm"}


# --- exit status


def test_wrong_input_ends_with_status_2_and_one_message_without_a_traceback(write):
    path = write("training: {stesp: 3, batch_size: no}\ngrpo: {n_samples: 1}")
    done = run_python(APP, "--config", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {path}: 3 problems\n"
        "  * training.stesp is not a key of the config, got 3.\n"
        "    Fix: did you mean training.steps or training.seed?\n"
        "  * training.batch_size must be int at least 1, got false.\n"
        "    Fix: write int at least 1\n"
        "  * grpo.n_samples must be at least 2, got 1: a single sample has no baseline.\n"
        "    Fix: set grpo.n_samples to at least 2\n"
    )


def test_right_input_starts_and_hands_on_dry_run(write):
    assert run_python(APP, "--config", write(), "--dry_run").stdout == "started True\n"
    assert run_python(APP, f"--config={write()}").stdout == "started False\n"


def test_missing_config_shows_the_files_to_start_from():
    done = run_python(APP, cwd=ROOT)
    assert done.returncode == 2
    assert "--config apps/grpo/toy.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [1, 2", "not valid YAML"),
        (b"model: a\nmodel: b", "found duplicate key model"),
        (b"model: !!python/object:os.system x", "not valid YAML"),
        (b"model: !!bool x", "not valid YAML"),
        (b"\xff\xfe", "UTF-8"),
        (b"- model", "must hold `key: value` lines"),
        (b"", "model is missing and has no default"),
        (b"model: ???", "model is still marked ???"),
        (b"model: a\nloss: {name: a.B, args: {x: '???'}}", "loss.args.x is still marked ???"),
        (b"model: ${nope}", "model cannot be resolved: Interpolation key 'nope' not found"),
        (b"model: ${oc.env:FORGE_NO_SUCH_VARIABLE}", "Environment variable 'FORGE_NO_SUCH_VARIABLE' not found"),
        (b"model: ${model}", "model cannot be resolved"),
        (b"model: a\ntraining: 3", "training must be {steps, "),
        (b"model: a\nrewards: x.Y", "rewards must be list of str or {reward, weight, args}"),
        (b"model: a\nrewards: [{weight: 2}]", "rewards.0.reward is missing and has no default"),
        (b"model: a\n1: 2", "1 is not a key of the config"),
        (b"model: a\nloss: {name: a.B, args: {1: 2}}", "loss.args.1 must have a name that is text"),
        (b"model: a\nloss: {name: a.B, args: {x: {1: {}}}}", "loss.args.x.1 must have a name that is text"),
        (b"model: a\nloss: {name: a.B, args: {0: '???'}}", "loss.args.0 must have a name that is text"),
        (b"model: a\ndataset: {parameters: {x: !!binary aGk=}}", "dataset.parameters.x must be a number, text"),
    ],
)
def test_file_that_cannot_be_used_is_told(tmp_path, content, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(GRPOConfig, path)
    assert message in str(error.value)
    assert "Fix: " in str(error.value)
    assert str(path) in str(error.value)


def test_missing_file_suggests_the_one_beside_it(write):
    path = write()
    with pytest.raises(ConfigError) as error:
        load_config(GRPOConfig, path.replace("config.yaml", "confg.yaml"))
    assert f"did you mean {path}?" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps"], "steps is not an option"),
        (["-x"], "-x is not an option"),
        (["--training.steps"], "training.steps needs a value after it"),
        (["--training.steps", "--dry_run"], "training.steps needs a value after it"),
        (["--config", "other.yaml"], "--config may be given once"),
        (["--hosts", "[a"], "hosts is not valid YAML"),
    ],
)
def test_command_line_that_cannot_be_read_is_told(write, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        parse_args(GRPOConfig, ["--config", write(), *arguments], prog=PROG)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_folder_that_cannot_be_written_is_told_before_the_start(write, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        parse_args(GRPOConfig, ["--config", write(), "--output_dir", str(tmp_path / "file/run")], prog=PROG)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert f'output_dir must be a folder that can be written, got "{tmp_path}/file/run"' in message
    assert "Fix: --output_dir" in message


def test_message_never_shortens_a_path(tmp_path):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "a folder with spaces" / ("x" * 200) / ("y" * 200))
    with pytest.raises(ConfigError) as error:
        make_output_dir(path, app="grpo")
    assert f'got "{path}"' in str(error.value)
    assert show([path.replace(" ", "-"), "next"]) == f'["{path.replace(" ", "-")}", …'


def test_message_cuts_a_long_list_behind_a_whole_word():
    assert show(list(range(1000))) == f"[{', '.join(map(str, range(23)))}, …"


def test_folder_that_can_be_written_is_not_made_yet(write, tmp_path):
    parse_args(GRPOConfig, ["--config", write(), "--output_dir", str(tmp_path / "a/b")], prog=PROG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_run_folder_of_the_same_second_is_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-120000")
    made = [make_output_dir(None, app="grpo") for _ in range(3)]
    assert [str(path) for path in made] == [f"runs/grpo-20260101-120000{suffix}" for suffix in ("", "-2", "-3")]
    assert make_output_dir("again", app="grpo") == make_output_dir("again", app="grpo") == Path("again")
    with pytest.raises(ConfigError, match="output_dir must be a folder that can be made"):
        make_output_dir("a\0b", app="grpo")


def test_another_app_shares_the_sections_without_those_of_grpo(write):
    assert load_config(RunConfig, write("training: {steps: 3}\ndataset: {path: rows.jsonl}")).training.steps == 3
    with pytest.raises(ConfigError, match="grpo is not a key"):
        load_config(RunConfig, write("grpo: {}"))
