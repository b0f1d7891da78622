"""Settings: the paper's values, and a message for every mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recprune import InputError
from recprune.cli import main
from recprune.models.settings import (
    PRESETS,
    ModelSettings,
    Settings,
    TrainingSettings,
    describe_settings,
    find_preset,
)
from recprune.training.tensors import load_tensors
from tests.preparation.test_prepared import cycle

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


def test_the_presets_are_the_models_of_the_paper() -> None:
    papers = {"sasrec", "gsasrec", "gbert4rec"}
    assert set(PRESETS) == papers | {"esasrec", "timed", "continued", "recommended", "generative"}
    for preset in (PRESETS[name] for name in papers):
        assert preset.model.codes == "svd"
        assert (preset.model.width, preset.model.length) == (512, 200)
        assert preset.model.embedding == "recjpq"
        assert (preset.training.batch_size, preset.training.learning_rate) == (128, 0.001)
    for name in ("sasrec", "gsasrec"):
        model = PRESETS[name].model
        assert (model.architecture, model.num_blocks, model.num_heads) == ("sasrec", 2, 1)
    bert = PRESETS["gbert4rec"].model
    assert (bert.architecture, bert.num_blocks) == ("bert4rec", 3)
    plain = PRESETS["sasrec"].training
    assert (plain.loss, plain.num_negatives) == ("bce", 1)
    for name in ("gsasrec", "gbert4rec"):
        training = PRESETS[name].training
        assert (training.loss, training.num_negatives, training.calibration) == ("gbce", 256, 0.75)


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_json(name: str) -> None:
    changed = find_preset(name).with_values(
        {"width": 24, "dropout": 0.05, "windows": "random", "clip_norm": 0.5, "seed": 2**40}
    )
    assert Settings.from_json(json.loads(json.dumps(changed.to_json()))) == changed
    assert changed != find_preset(name)


def test_every_setting_says_what_it_means_and_what_is_expected() -> None:
    described = describe_settings(Settings())
    names = [entry.name for entry in described]
    assert names == [*Settings().to_json()["model"], *Settings().to_json()["training"]]
    for entry in described:
        assert entry.meaning, entry.name
        assert entry.expected, entry.name
    by_name = {entry.name: entry for entry in described}
    assert by_name["loss"].expected == "bce, gbce, softmax, cross_entropy, digits"
    assert by_name["exclude_seen"].expected == "true, false"
    assert by_name["dropout"].value == 0.2


def test_settings_are_listed_with_the_values_that_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "--list-settings", "--preset", "sasrec", "--set", "width=32"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["setting", "value", "expected", "meaning"]
    assert [line.split()[0] for line in lines] == [
        entry.name for entry in describe_settings(Settings())
    ]
    values = {line.split()[0]: line.split()[1] for line in lines}
    assert (values["width"], values["loss"], values["exclude_seen"]) == ("32", "bce", "false")
    # Values are written as --set reads them.
    given = [f"{name}={value}" for name, value in values.items()]
    again = ["train", "--list-settings", *(word for text in given for word in ("--set", text))]
    assert main(again) == 0
    assert capsys.readouterr().out.splitlines() == [header, *lines]
    assert main(["train", "--list-settings", "--resume", "--out", str(tmp_path)]) == 2
    assert "checkpoint.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], "folder of a prepared log is missing"),
        (["prepared"], "--out FOLDER is missing"),
        (["--list-settings", "--resume"], "--out FOLDER is missing"),
    ],
)
def test_train_says_which_folder_is_missing(
    capsys: pytest.CaptureFixture[str], words: list[str], missing: str
) -> None:
    assert main(["train", *words]) == 2
    assert missing in capsys.readouterr().err


def test_what_json_leaves_out_is_the_default() -> None:
    assert Settings.from_json({}) == Settings()
    found = Settings.from_json({"model": {"num_blocks": 5}})
    assert found.model == ModelSettings(num_blocks=5)
    assert found.training == TrainingSettings()


def test_values_replace_only_what_they_name() -> None:
    before = find_preset("sasrec")
    after = before.with_values({"length": 50, "patience": 3})
    assert after.model == dataclasses.replace(before.model, length=50)
    assert after.training == dataclasses.replace(before.training, patience=3)
    assert before.model.length == 200
    assert before.with_values({}) == before


def test_names_of_settings_are_unique() -> None:
    names = [
        field.name
        for kind in (ModelSettings, TrainingSettings)
        for field in dataclasses.fields(kind)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("widht", "width"), ("num_negative", "num_negatives"), ("learningrate", "learning_rate")],
)
def test_a_misspelt_setting_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"unknown setting '{name}': did you mean '{nearest}'?"):
        Settings().with_values({name: 1})


def test_a_misspelt_name_in_json_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown setting 'modle': did you mean 'model'?"):
        Settings.from_json({"modle": {}})
    with pytest.raises(InputError, match="unknown setting 'lenght': did you mean 'length'?"):
        Settings.from_json({"model": {"lenght": 3}})
    with pytest.raises(InputError, match="unknown setting 'patienc': did you mean 'patience'?"):
        Settings.from_json({"training": {"patienc": 3}})


def test_a_setting_in_the_wrong_part_is_refused() -> None:
    with pytest.raises(InputError, match="unknown setting 'patience'"):
        Settings.from_json({"model": {"patience": 3}})


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(InputError, match="unknown setting 'zzz': there are architecture, .*, seed"):
        Settings().with_values({"zzz": 1})


def test_the_default_preset_can_do_without_its_repeat_head() -> None:
    chosen = find_preset("recommended").with_values({"repeats": 0, "exclude_seen": True})
    assert chosen.model.activity
    assert not chosen.model.knows_activity


def test_a_misspelt_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown preset 'gsasrek': did you mean 'gsasrec'?"):
        find_preset("gsasrek")


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("architecture", "gru"), ("architecture", None), ("embedding", "hash"), ("loss", "mse"),
        ("windows", "first"), ("windows", ["last"]),
        ("width", 0), ("width", -8), ("width", 8.0), ("width", "8"), ("width", True),
        ("num_blocks", 0), ("num_heads", 0), ("num_heads", 3), ("length", 0), ("length", None),
        ("dropout", 1.0), ("dropout", -0.1), ("dropout", NAN), ("dropout", "0.1"),
        ("inner_share", 0.0), ("inner_share", -1.0), ("inner_share", NAN), ("inner_share", "half"),
        ("num_negatives", 0), ("batch_size", 0), ("batch_size", 1.5), ("max_epochs", 0),
        ("batches_per_epoch", 0), ("patience", 0), ("validation_users", -1),
        ("calibration", -0.1), ("calibration", 1.1), ("calibration", NAN), ("calibration", "high"),
        ("learning_rate", 0.0), ("learning_rate", -1.0), ("learning_rate", NAN),
        ("learning_rate", float("inf")), ("learning_rate", "fast"), ("learning_rate", None),
        ("clip_norm", -1.0), ("clip_norm", NAN), ("clip_norm", "none"),
        ("mask_share", 0.0), ("mask_share", 1.0), ("mask_share", NAN), ("mask_share", "half"),
        ("exclude_seen", "no"), ("exclude_seen", 2), ("exclude_seen", None),
        ("seed", -1), ("seed", 1.0), ("seed", True), ("seed", "0"), ("seed", 2**64),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Settings().with_values({name: value})


def test_a_network_is_a_share_of_the_width_inside_and_never_empty() -> None:
    preset = find_preset("esasrec").model
    assert (preset.width, preset.inner_width) == (512, 128)
    assert ModelSettings("esasrec").inner_width == 512
    assert ModelSettings("esasrec", width=3, inner_share=0.5).inner_width == 2
    assert ModelSettings("esasrec", width=3, inner_share=0.1).inner_width == 1


def test_bce_has_one_negative() -> None:
    with pytest.raises(InputError, match="bce has one negative, num_negatives is 256"):
        Settings().with_values({"loss": "bce"})
    assert Settings().with_values({"loss": "bce", "num_negatives": 1}).training.loss == "bce"


# The command -------------------------------------------------------------------------------------

TINY = [
    "width=16",
    "length=8",
    "num_blocks=1",
    "max_epochs=1",
    "num_negatives=3",
    "batch_size=20",
]


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    cycle(20).save(tmp_path / "prepared")
    return str(tmp_path / "prepared")


def trained_with(prepared: str, *options: str) -> Settings:
    out = Path(prepared).with_name("model")
    assert main(["train", prepared, "--out", str(out), *options]) == 0
    _, metadata = load_tensors(out / "model.safetensors")
    return Settings.from_json(json.loads(metadata["settings"]))


def words(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_the_command_takes_single_settings(prepared: str) -> None:
    options = [*words(TINY), *words(["loss=softmax", "exclude_seen=true", "dropout=0"])]
    found = trained_with(prepared, "--preset", "gbert4rec", *options)
    expected = find_preset("gbert4rec").with_values(
        {
            "width": 16,
            "length": 8,
            "num_blocks": 1,
            "max_epochs": 1,
            "num_negatives": 3,
            "batch_size": 20,
            "loss": "softmax",
            "exclude_seen": True,
            "dropout": 0,
        }
    )
    assert found == expected


def test_the_command_puts_a_file_over_the_preset_and_single_settings_over_all(
    prepared: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"model": {"width": 32, "length": 5}, "training": {"seed": 7}}))
    found = trained_with(prepared, "--settings", str(path), *words(TINY))
    assert (found.model.width, found.model.length) == (16, 8)  # not 32 and 5
    assert found.training.seed == 7  # not 0
    assert found.training.loss == "softmax"  # of the default preset


def test_a_file_need_only_fit_the_preset_that_it_is_put_over(prepared: str, tmp_path: Path) -> None:
    """SASRec's preset has one negative; the defaults have 256, which bce does not take."""
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"training": {"loss": "bce", "batch_size": 20}}))
    small = [value for value in TINY if not value.startswith("num_negatives")]
    found = trained_with(prepared, "--preset", "sasrec", "--settings", str(path), *words(small))
    assert (found.training.loss, found.training.num_negatives) == ("bce", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "widht=16"], "unknown setting 'widht': did you mean 'width'?"),
        (["--set", "width"], "--set width: expected NAME=VALUE"),
        (["--set", "width=wide"], "width is 'wide'"),
        (["--set", "learning_rate=fast"], "learning_rate is 'fast'"),
        (["--set", "exclude_seen=no"], "exclude_seen is 'no'"),
        (["--preset", "sasrek"], "unknown preset 'sasrek': did you mean 'sasrec'?"),
        (["--settings", "nowhere.json"], "nowhere.json: cannot be read: No such file"),
        (["--settings", "text.json"], "text.json: not readable as JSON"),
        (["--settings", "list.json"], "list.json: expected an object with model and training"),
        (["--settings", "flat.json"], "flat.json: expected an object with model and training"),
        (["--settings", "wrong.json"], "unknown setting 'widht': did you mean 'width'?"),
        (["--set", "width=18"], "width 18 is not a multiple of the 4 splits"),
    ],
)
def test_mistakes_in_settings_end_with_a_message(
    prepared: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("text", "width: 16"),
        ("list", "[1]"),
        ("flat", '{"width": 16}'),
        ("wrong", '{"model": {"widht": 16}}'),
    ):
        Path(f"{name}.json").write_text(text)
    assert (
        main(["train", prepared, "--out", "model", "--preset", "gsasrec", *words(TINY), *options])
        == 2
    )
    assert message in capsys.readouterr().err
    assert not Path("model").exists()
