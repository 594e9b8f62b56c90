# SPDX-License-Identifier: GPL-3.0-or-later
"""Link ceilings and the decode roofline, against figures computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_samples import GLM, ONLY_EXPERTS
from gpu_tuning.benchmark import pcie, roofline
from hypothesis import given
from hypothesis import strategies as st

GTS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@pytest.mark.parametrize(
    ("generation", "link", "write", "reads"),
    [
        (3, 15.75, 14.36, {256: 14.57, 128: 13.59, 64: 11.97}),
        (4, 31.51, 28.73, {256: 29.15, 128: 27.18, 64: 23.94}),
        (5, 63.02, 57.46, {256: 58.29, 128: 54.35, 64: 47.88}),
    ],
)
def test_ceilings_of_x16_at_max_payload_256(
    generation: int, link: float, write: float, reads: dict[int, float]
) -> None:
    gts = GTS[generation]
    assert pcie.link_gbps(gts, 16) == pytest.approx(link, abs=0.01)
    assert pcie.payload_ceiling_gbps(gts, 16, 256, pcie.WRITE) == pytest.approx(write, abs=0.01)
    for completion, wanted in reads.items():
        found = pcie.payload_ceiling_gbps(gts, 16, 256, pcie.READ, completion)
        assert found == pytest.approx(wanted, abs=0.015)


def test_a_larger_payload_lifts_the_ceiling_and_generation_6_is_near_111() -> None:
    assert pcie.payload_ceiling_gbps(32, 16, 512, pcie.WRITE) == pytest.approx(60.03, abs=0.01)
    assert pcie.payload_ceiling_gbps(32, 16, 512, pcie.READ) == pytest.approx(60.48, abs=0.01)
    assert pcie.payload_ceiling_gbps(64, 16, 256, pcie.WRITE) == pytest.approx(111, abs=0.5)


def test_the_known_figures_as_shares_of_their_ceilings() -> None:
    write = pcie.payload_ceiling_gbps(32, 16, 256, pcie.WRITE)
    read = pcie.payload_ceiling_gbps(32, 16, 256, pcie.READ)
    shares = [50 / write, 37 / write, 53 / read, 53 / write, 56.57 / write]
    assert [round(100 * share, 1) for share in shares] == [87.0, 64.4, 90.9, 92.2, 98.5]


links = st.tuples(
    st.sampled_from(list(GTS.values())),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([128, 256, 512, 1024]),
)


@given(links, st.sampled_from([pcie.READ, pcie.WRITE]))
def test_a_ceiling_is_below_its_link_and_grows_with_payload_and_width(
    where: tuple[float, int, int], direction: str
) -> None:
    gts, width, payload = where
    ceiling = pcie.payload_ceiling_gbps(gts, width, payload, direction)
    assert 0 < ceiling < pcie.link_gbps(gts, width)
    assert pcie.payload_ceiling_gbps(gts, width, payload * 2, direction) > ceiling
    assert pcie.payload_ceiling_gbps(gts, width * 2, payload, direction) == pytest.approx(2 * ceiling)


@pytest.mark.parametrize("text", ["Unknown", "", "fast GT/s"])
def test_an_unknown_speed_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="GT/s"):
        pcie.parse_speed(text)


def test_speeds_as_sysfs_writes_them() -> None:
    assert pcie.parse_speed("32.0 GT/s PCIe") == 32.0
    assert pcie.parse_speed("2.5 GT/s") == 2.5


@pytest.mark.parametrize("arguments", [(32.0, 16, 0), (32.0, 16, 300), (0.0, 16, 256), (32.0, 0, 256)])
def test_links_that_cannot_be_are_refused(arguments: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError):
        pcie.payload_ceiling_gbps(*arguments, pcie.WRITE)


def test_active_weights_of_a_large_mixture_of_experts() -> None:
    billions = {part.name: round(part.weights / 1e9, 2) for part in roofline.active_parts(GLM)}
    wanted = {"attention": 13.60, "routed experts": 22.65, "shared experts": 2.83, "dense layers": 0.68}
    assert billions == {**wanted, "output head": 0.95}


BANDWIDTH = roofline.memory_bandwidth_gbps(14001, 512)


def test_memory_bandwidth_follows_clock_and_bus() -> None:
    assert pytest.approx(1792, abs=0.5) == BANDWIDTH
    assert roofline.memory_bandwidth_gbps(12481, 512) == pytest.approx(1597.6, abs=0.1)


@pytest.mark.parametrize(
    ("billions", "weight", "kv", "wanted"),
    [(40, 0.5, 0, 358), (40, 0.5625, 0, 319), (40.83, 0.5625, 0, 312), (40.83, 0.5625, 0.184, 309.6)],
)
def test_the_recorded_assumption_and_its_neighbours(
    billions: float, weight: float, kv: float, wanted: float
) -> None:
    found = roofline.from_active_parameters(billions, weight, kv, 4, BANDWIDTH)
    assert found.tokens_per_s == pytest.approx(wanted, abs=0.7)


def test_kv_cache_of_latent_attention() -> None:
    assert 2048 * roofline.kv_bytes_per_token(GLM) / 1e9 == pytest.approx(0.184, abs=0.001)


@pytest.mark.parametrize(
    ("quant", "wanted", "share"),
    [
        (ONLY_EXPERTS, 146, 7.1),
        ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.self_attn*"]}}, 163, 6.4),
        ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}, 312, 3.3),
        (None, 88, 11.8),
    ],
)
def test_the_checkpoints_own_formats_decide_the_ceiling(quant: Any, wanted: float, share: float) -> None:
    found = roofline.from_checkpoint(GLM, quant, 0, 4, BANDWIDTH)
    assert found.tokens_per_s == pytest.approx(wanted, abs=1.2)
    assert 100 * 10.36 / found.tokens_per_s == pytest.approx(share, abs=0.1)
    assert any("GPUs active per step" in line for line in found.assumptions)


def test_pipeline_stages_take_turns() -> None:
    assert roofline.gpus_active_per_step(4, 2) == 4


def test_a_dense_model_with_grouped_queries() -> None:
    llama = {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336,
    }  # fmt: skip
    total = sum(part.weights for part in roofline.active_parts(llama))
    assert total / 1e9 == pytest.approx(7.5, abs=0.05)  # 8.03 B less the input embedding
    assert roofline.kv_bytes_per_token(llama) == 2 * 32 * 8 * 128 * 2


def test_an_unknown_architecture_or_format_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="num_hidden_layers"):
        roofline.active_parts({"hidden_size": 1, "num_attention_heads": 1, "vocab_size": 5})
    with pytest.raises(ValueError, match="GGUF"):
        roofline.from_checkpoint(GLM, {"quantization": {"quant_algo": "gguf"}}, 0, 1, 1000.0)
