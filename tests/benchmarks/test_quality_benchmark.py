"""The quality benchmark's own parts: the off-grid model, the pieces it is carried in, and the
comparison.
"""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "benchmarks/workshop", "benchmarks/quality", "tests/quant")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import exl3  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402
import pieces  # noqa: E402
import run  # noqa: E402
import serving  # noqa: E402
import table  # noqa: E402
import vllm_agreement  # noqa: E402
from offgrid import make_offgrid  # noqa: E402
from tiny_model import make_tiny_model  # noqa: E402

from flyweight.checkpoint.reader import Checkpoint  # noqa: E402
from flyweight.models.decoder import Decoder  # noqa: E402
from flyweight.quant import recipe  # noqa: E402


def test_off_grid_weights_differ_and_their_function_does_not(tmp_path):
    source = make_tiny_model(tmp_path / "model")
    target = make_offgrid(str(source), tmp_path / "offgrid")
    tokens = torch.arange(3, 43)[None]
    before, after = (
        Decoder.load(Checkpoint(folder), device="cpu", dtype=torch.float32).forward_whole(tokens)
        for folder in (source, target)
    )
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
    for name in (
        "self_attn.q_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ):
        key = f"model.layers.1.{name}.weight"
        ratio = Checkpoint(target).tensor(key) / Checkpoint(source).tensor(key)
        assert float(ratio.std()) > 0.05


def test_pieces_come_back_as_they_were(tmp_path):
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 9000)
    (folder / "inner" / "note.txt").write_text("text")
    facts = pieces.cut(tmp_path / "pieces", [folder, folder / "weights.bin"], size=1_000_000)
    assert [fact["bytes"] for fact in facts[:-1]] == [1_000_000] * (len(facts) - 1)
    pieces.join(tmp_path / "pieces", tmp_path / "back")
    assert (tmp_path / "back" / "model" / "inner" / "note.txt").read_text() == "text"
    for path in ("weights.bin", "model/weights.bin"):
        assert (tmp_path / "back" / path).read_bytes() == (folder / "weights.bin").read_bytes()


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_piece_that_is_missing_or_damaged_is_named(harm, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    pieces.cut(tmp_path / "pieces", [tmp_path / "file"], size=4000)
    piece = tmp_path / "pieces" / "piece-001"
    piece.unlink() if harm == "missing" else piece.write_bytes(b"y" * piece.stat().st_size)
    with pytest.raises(SystemExit, match=f"piece-001 is {harm}"):
        pieces.join(tmp_path / "pieces", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def row(losses, bits=4.25, seed=0):
    return {"window_losses": losses, "bits_per_weight": bits, "seed": seed}


def test_a_difference_counts_only_beyond_two_standard_errors():
    theirs = [row([2.0, 3.0, 2.5, 3.5])]
    assert table.verdict([row([1.9, 2.9, 2.41, 3.4])], theirs).startswith("better")
    assert table.verdict([row([2.1, 3.1, 2.6, 3.61])], theirs).startswith("worse")
    assert table.verdict([row([1.8, 3.2, 2.3, 3.6])], theirs).startswith("equal")
    assert "with more bits" in table.verdict([row([1.9, 2.9, 2.41, 3.4], bits=4.5)], theirs)


def test_seeds_that_disagree_widen_the_error():
    steady = table.difference([row([1.9, 2.9, 2.4])], [row([2.0, 3.0, 2.5])])
    seeds = [row([1.7, 2.7, 2.2]), row([2.1, 3.1, 2.6], seed=1)]
    gap, error = table.difference(seeds, [row([2.0, 3.0, 2.5])])
    assert gap == pytest.approx(steady[0])
    assert error > steady[1] + 0.1


def test_jobs_need_one_seed_where_nothing_is_calibrated_and_finish_a_seed_first():
    jobs = run.make_jobs(
        ["rtn-int4", "gptq-int4", "int4-best", "autoround-int4"],
        ["llm-compressor", "auto-round"],
        [0, 1],
        [],
    )
    names = [job.name for job in jobs]
    assert names[0] == "original/fp32/0"
    assert "flyweight/rtn-int4/0" in names and "flyweight/rtn-int4/1" not in names
    assert "llm-compressor/rtn-int4/1" not in names and "llm-compressor/gptq-int4/1" in names
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    # in the order in which they were named
    assert names[1:3] == ["llm-compressor/rtn-int4/0", "flyweight/rtn-int4/0"]
    every = [job.name for job in run.make_jobs(["all"], ["auto-round"], [0], [])]
    assert every[1] == "flyweight/int4-best/0"  # slow ones first where all are asked for


def test_ours_is_made_again_when_the_solvers_change_and_a_peers_is_not():
    def done(tool, **more):
        return {
            "bench": "quality",
            "status": "ok",
            "tool": tool,
            "job": f"{tool}/x/0",
            "model": "m",
            "text": "t",
            **more,
        }

    rows = [
        done("llm-compressor"),
        done("flyweight"),
        done("flyweight", job="flyweight/y/0", solvers=run.solvers_digest()),
        done("auto-round", status="failed"),
    ]
    assert run.finished_jobs(rows, "m", ["t"]) == {"llm-compressor/x/0", "flyweight/y/0"}
    assert run.finished_jobs(rows, "m", ["t", "u"]) == run.finished_jobs(rows, "n", ["t"]) == set()


def test_every_rival_is_a_scheme_that_someone_makes():
    made = {(tool, scheme) for tool, schemes in peers.SCHEMES.items() for scheme in schemes}
    rivals = {rival for others in peers.RIVALS.values() for rival in others}
    assert {rival for rival in rivals if rival[0] != "flyweight"} <= made
    assert ("llm-compressor", "rtn-int8-group") in peers.RIVALS[
        "rtn-int8"
    ] and "rtn-int4-mse" not in peers.RIVALS


def test_recipes_that_wait_to_be_measured_are_held_against_the_same_bits():
    found = {
        path.stem: recipe.load(path)
        for path in sorted(Path(run.__file__).parent.glob("recipes/*.toml"))
    }
    assert len(found) == 5 and all(
        name in peers.RIVALS and ("flyweight", name) not in peers.RIVALS[name] for name in found
    )
    for name, one in found.items():
        assert str(one.layer.bits) in name and one.tune_steps
        assert all(str(one.layer.bits) in rival for _, rival in peers.RIVALS[name])


def test_exl3_walks_a_model_with_one_hessian_for_siblings_and_says_what_its_file_would_take(
    tmp_path, monkeypatch
):
    source = make_tiny_model(tmp_path / "model")
    seen = []

    def quantize(weight, hessian, arguments, _):
        seen.append((weight.shape, id(hessian), hessian["count"], arguments["K"]))
        return torch.zeros_like(weight), 0.0, {}

    monkeypatch.setattr(exl3, "quantizer", lambda folder: quantize)
    tokens = torch.arange(64).view(4, 16)
    folder = exl3.exl3(
        "exl3-3bit", source, tokens, tmp_path / "made", device="cpu", seed=0, steps=0
    )
    assert [one for _, one, *_ in seen[:3]] == [seen[0][1]] * 3 and seen[3][1] != seen[0][1]
    assert all(size % exl3.WIDTH == 0 for shape, *_ in seen for size in shape)
    assert all(count == tokens.numel() and bits == 3 for *_, count, bits in seen)
    made = Checkpoint(folder)
    weight = Checkpoint(source).tensor("model.layers.0.mlp.up_proj.weight")
    assert not made.tensor("model.layers.0.mlp.up_proj.weight").any() and weight.any()
    stored = sum(3 * shape.numel() + 16 * sum(shape) for shape, *_ in seen)
    weights = sum(made.tensor(name).numel() for name in made.names() if "_proj.weight" in name)
    assert measure.facts_of(made)["bits_per_weight"] == pytest.approx(stored / weights)


def test_exl3_is_found_for_a_second_job_of_the_same_process(tmp_path, monkeypatch):
    place = tmp_path / "exllamav3" / "modules" / "quant" / "exl3_lib"
    place.mkdir(parents=True)
    (tmp_path / "exllamav3" / "__init__.py").touch()
    (place / "quantize.py").write_text("def quantize_exl3(*_): return 'quantized'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(exl3, "build", lambda folder: "extension")
    exl3.quantizer.cache_clear()
    try:
        first = exl3.quantizer(tmp_path / "built")
        assert exl3.quantizer(tmp_path / "built") is first and first() == "quantized"
    finally:
        exl3.quantizer.cache_clear()


def test_the_last_good_row_of_a_seed_counts(tmp_path):
    rows = [
        dict(
            row([1.0]),
            bench="quality",
            status=status,
            tool="flyweight",
            scheme="s",
            seed=0,
            perplexity=value,
        )
        for status, value in (("ok", 1.0), ("ok", 2.0), ("failed", 3.0))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [r["perplexity"] for r in table.collect(tmp_path / "rows.jsonl")["flyweight", "s"]] == [
        2.0
    ]


def test_the_document_shows_what_lost_and_what_did_not_finish(tmp_path):
    def quality(tool, scheme, losses, **more):
        return (
            dict(
                row(losses),
                bench="quality",
                status="ok",
                tool=tool,
                scheme=scheme,
                job=f"{tool}/{scheme}/0",
                environment="e",
                perplexity=10.0,
            )
            | more
        )

    rows = [
        {"bench": "environment", "id": "e", "device": "a GPU", "commit": "abc"},
        quality("flyweight", "rtn-int4", [2.1, 3.1, 2.6, 3.61]),
        quality("llm-compressor", "rtn-int4", [2.0, 3.0, 2.5, 3.5]),
        quality("flyweight", "int4-best", [], status="failed", reason="stopped: out of time"),
        quality("flyweight", "fp8", [], status="failed", reason="once"),
        quality("flyweight", "fp8", [2.0, 3.0, 2.5, 3.5]),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert table.made_on(tmp_path / "rows.jsonl") == "Measured on a GPU, commit abc."
    text = table.document(tmp_path / "rows.jsonl")
    assert "| rtn-int4 | llm-compressor rtn-int4 | **worse +" in text
    assert "| gptq-int4 |" not in text  # of which there are no rows
    assert "- flyweight/int4-best/0: stopped: out of time" in text and "once" not in text


def test_the_best_lines_name_the_strongest_rival(tmp_path):
    def made(tool, scheme, perplexity, ratio):
        return dict(
            bench="quality",
            status="ok",
            tool=tool,
            scheme=scheme,
            seed=0,
            perplexity=perplexity,
            log_ratio=ratio,
            bits_per_weight=4.3125,
        )

    rows = [
        made("flyweight", "int4-best", 32.0, 0.03),
        made("auto-round", "autoround-int4", 33.5, 0.08),
        made("auto-round", "autoround-int4-asym", 33.0, 0.06),
        made("flyweight", "vptq-2bit", 54.0, 0.55),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert table.best_lines(table.collect(tmp_path / "rows.jsonl"))[2:] == [
        "| 4 bits | int4-best: +3.0 % (4.31 bits) "
        "| auto-round autoround-int4-asym: +6.2 % (4.31 bits) |",
        "| 2 bits | vptq-2bit: +73.3 % (4.31 bits) | – |",
    ]


def test_vllm_agrees_where_only_near_ties_fall_the_other_way():
    expected = torch.log_softmax(torch.tensor([[2.0, 1.95, 0.0], [3.0, 0.0, 0.0]]), -1)
    ids = [0, 1, 0]

    def place(best, own, logprob):
        return {best: (1, -0.1), own: (1 if own == best else 2, logprob)}

    near = [place(1, 1, float(expected[0, 1])), place(0, 0, float(expected[1, 0]))]
    facts = vllm_agreement.compare(expected, near, ids)
    assert facts["agrees"] and facts["first_difference"] == {
        "position": 1,
        "top2_gap": pytest.approx(0.05, abs=1e-4),
    }
    far = [place(0, 1, float(expected[0, 1])), place(2, 0, float(expected[1, 0]))]
    assert not vllm_agreement.compare(expected, far, ids)["agrees"]

    # As far from ours as ours is from itself when its inputs are rounded: no nearer could be asked
    # for.
    other = torch.log_softmax(torch.tensor([[2.0, 1.95, 0.0], [0.0, 0.0, 3.0]]), -1)
    place_of_other = [place(0, 1, float(other[0, 1])), place(2, 0, float(other[1, 0]))]
    facts = vllm_agreement.compare(expected, place_of_other, ids, other)
    assert facts["agrees"] and facts["floor_same_argmax"] == facts["same_argmax"] == 1


def test_jobs_are_done_by_a_worker_or_in_this_process_and_only_once(tmp_path, monkeypatch):
    source = make_tiny_model(tmp_path / "model", max_position_embeddings=512)
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven " * 200)
    out = tmp_path / "rows.jsonl"
    options = f"--model {source} --text {text} --calibration {text} --out {out} --device cpu"
    few = "--seeds 0 --samples 2 --length 32 --windows 1 --measurers 2 --spare 0.1"
    for more in ("--jobs 1 --schemes rtn-int8", "--jobs 0 --schemes rtn-int8 rtn-int4"):
        monkeypatch.setattr(sys, "argv", ["run.py", *options.split(), *few.split(), *more.split()])
        run.main()
    rows = [
        row for row in map(json.loads, out.read_text().splitlines()) if row["bench"] == "quality"
    ]
    assert [row["job"] for row in rows] == [
        "original/fp32/0",
        "flyweight/rtn-int8/0",
        "flyweight/rtn-int4/0",
    ]
    assert {row["status"] for row in rows} == {"ok"}


def test_recipes_that_want_the_models_own_text_share_it_and_rows_say_how_much(
    tmp_path, monkeypatch
):
    source = make_tiny_model(tmp_path / "model", max_position_embeddings=512)
    text, out = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text("one two three four five six seven " * 200)
    for bits in (3, 4):
        (tmp_path / f"own{bits}.toml").write_text(
            f'base = "gptq-int4"\nbits = {bits}\nown_text = 2\n'
        )
    options = (
        f"--model {source} --text {text} --calibration {text} --out {out} --device cpu --jobs 0 "
        "--seeds 0"
    )
    few = (
        "--samples 2 --length 32 --windows 1 --schemes own3 own4 gptq-int4 "
        f"--recipes {tmp_path}/own3.toml {tmp_path}/own4.toml"
    )
    monkeypatch.setattr(sys, "argv", ["run.py", *options.split(), *few.split()])
    run.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {
        row["scheme"]: row["calibration"]
        for row in rows
        if row["bench"] == "quality" and "calibration" in row
    }
    assert found["own3"] == found["own4"] and (found["own3"]["own"], found["own3"]["samples"]) == (
        4,
        6,
    )
    assert found["gptq-int4"]["samples"] == 2 and "own" not in found["gptq-int4"]
    assert len(list(tmp_path.glob("rows.work/*-own-*.safetensors"))) == 1


def test_other_learning_steps_change_tunings_in_proportion(tmp_path):
    (tmp_path / "long.toml").write_text('base = "int4-best"\ntune_steps = 600\n')
    model = make_tiny_model(tmp_path / "model")
    setting = run.Setting(
        str(model), (), "", "", "cpu", 2, 32, 1, 50, False, (("long", str(tmp_path / "long.toml")),)
    )
    long, plain = (
        run.Worker(setting).chosen(run.Job("flyweight", name, 0)) for name in ("long", "int4-best")
    )
    assert (long.learn_steps, long.tune_steps) == (50, 150)
    assert (plain.learn_steps, plain.tune_steps) == (50, 50)
    (tmp_path / "long.toml").write_text('base = "gptq-int4"\ntune_steps = 600\n')
    setting = dataclasses.replace(setting, tune_steps=80)
    long, plain = (
        run.Worker(setting).chosen(run.Job("flyweight", name, 0)) for name in ("long", "int4-best")
    )
    assert (long.tune_steps, plain.tune_steps) == (80, 50)


SMALL_TRAINING = (
    "--hidden 64 --layers 1 --vocabulary 300 --length 32 --batch 4 --device cpu --seconds 1e9"
)


def test_training_goes_on_where_it_was_cut_off(tmp_path, monkeypatch, capsys):
    import train_small

    (tmp_path / "text.txt").write_text(
        "".join(f"{i} squared is {i * i}, and its half {i / 2}.\n" for i in range(3000))
    )

    def trained(folder, steps):
        small = f"{SMALL_TRAINING} --rate 1e-3"
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "train_small.py",
                str(folder),
                "--text",
                str(tmp_path / "text.txt"),
                "--steps",
                str(steps),
                *small.split(),
            ],
        )
        train_small.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    # else it depends on the steps in all
    monkeypatch.setattr(train_small.Training, "rate", lambda self: 1e-3)
    whole = trained(tmp_path / "whole", 6)
    trained(tmp_path / "parts", 2)
    parts = trained(tmp_path / "parts", 6)
    assert (
        whole["steps"] == parts["steps"] == 6 and whole["held_out_loss"] == parts["held_out_loss"]
    )
    logits = Decoder.load(
        Checkpoint(tmp_path / "parts"), device="cpu", dtype=torch.float32
    ).forward_whole(torch.arange(8)[None])
    assert logits.shape == (1, 8, 300) and logits.isfinite().all()


def test_a_training_that_failed_is_said_and_no_model_is_left(tmp_path, monkeypatch):
    """One batch without a loss changes nothing; a model of NaN is no model."""
    import train_small

    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    small = f"{SMALL_TRAINING} --steps 3"
    loss = train_small.Training.loss

    def trained(folder, factors):
        monkeypatch.setattr(
            sys,
            "argv",
            ["train_small.py", str(folder), "--text", str(tmp_path / "text.txt"), *small.split()],
        )
        monkeypatch.setattr(
            train_small.Training, "loss", lambda self, ids: next(factors) * loss(self, ids)
        )
        train_small.main()

    trained(tmp_path / "good", itertools.chain([1.0, math.nan], itertools.repeat(1.0)))
    assert (tmp_path / "good" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="the loss is nan"):
        trained(tmp_path / "bad", itertools.repeat(math.nan))
    assert not (tmp_path / "bad" / "model.safetensors").exists()


def test_scales_of_groups_are_stored_in_16_bits_and_those_of_channels_as_they_are(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file(
        {
            "a.weight_scale": torch.rand(4, 2),
            "b.weight_scale": torch.rand(4, 1),
            "norm.weight": torch.rand(4),
        },
        tmp_path / "model.safetensors",
    )
    peers.narrow_scales(tmp_path)
    found = {name: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert found == {
        "a.weight_scale": torch.float16,
        "b.weight_scale": torch.float32,
        "norm.weight": torch.float32,
    }


def test_peers_take_the_group_size_of_our_schemes(tmp_path):
    for widths, group in (((576, 1536, 9), 64), ((896, 4864, 14), 128)):
        config = dict(
            zip(("hidden_size", "intermediate_size", "num_attention_heads"), widths, strict=True)
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert peers.group_of(tmp_path) == group


def test_tables_of_serving_show_the_last_row_of_each_kind(tmp_path):
    def write(name, *rows):
        lines = (
            json.dumps(
                {"bench": "quality", "status": "ok", "model": "models/m.gguf", "scheme": "s"} | one
            )
            for one in rows
        )
        (tmp_path / name).write_text("\n".join(lines))

    cache = dict(
        text="t", kv_dtype="int8", log_ratio=0.5, log_ratio_error=0.001, kl=0.25, tokens=1000
    )
    write("kv-cache.jsonl", cache, cache | {"log_ratio": 0.0})
    assert serving.caches([tmp_path]).splitlines()[2:] == [
        "| m | t | int8 | +0.00 ± 0.10 % | 0.25000 | 1,000 |"
    ]
    write("needle.jsonl", dict(kv_dtype="fp8", window=4096, found=[True, False]))
    assert serving.needles([tmp_path]).splitlines()[-1] == "| m | fp8 | 1 of 2 |"
    write(
        "heads.jsonl",
        dict(head="stored", kl=0.1, kl_growth=0),
        dict(head="int8", kl=0.101, kl_growth=0.01),
    )
    assert serving.heads([tmp_path]).splitlines()[-1] == "| m | s | 0.1000 | +1.00 % |"
    assert serving.prompts([tmp_path]) == serving.books([tmp_path]) == "", "nothing was measured"
    right = dict(
        accuracy_original=0.5, accuracy=0.49, accuracy_change=-0.01, accuracy_change_error=0.004
    )
    write("tasks.jsonl", dict(task="piqa", questions=400) | right)
    assert (
        serving.tasks([tmp_path]).splitlines()[-1]
        == "| m | s | piqa | 400 | 50.00 % | 49.00 % | -1.00 ± 0.40 |"
    )


def test_the_error_of_a_change_is_a_share_of_the_perplexity_that_changed():
    """1 % of a perplexity that is three times the original's are 3 % of the original's."""
    assert table.change(math.log(3), 0.01) == "+200.00 ± 3.00 %"
    assert table.change(math.log(0.5), 0.01) == "-50.00 ± 0.50 %"
