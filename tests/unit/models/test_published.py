"""The table of published configs, against the parameter counts that their owners state."""

import pytest

from forge.models.architectures import check_architecture
from forge.models.published import published_config

# The number of parameters in the published safetensors, tied weights counted once.
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
    "hf://meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_the_shapes_add_up_to_the_published_number_of_parameters(model):
    config = published_config(model)
    assert config is not None
    assert check_architecture(config).num_parameters == PARAMETERS[model]


def test_a_model_that_is_not_in_the_table_has_no_published_config():
    assert published_config("someone/Model-7B") is None
    assert published_config("models/tiny") is None
