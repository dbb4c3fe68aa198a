import pytest
import torch

from forecast.forecast_cases import data, forecaster, net, write_csv
from titans_lm.forecast.baselines import DLinear, Linear, SeasonalNaive, make_model, model_spec
from titans_lm.forecast.evaluate import ForecastJob, evaluate_forecasters
from titans_lm.forecast.fit import closed_form, fit_model, score, score_streamed, window_loss
from titans_lm.forecast.model import Forecaster, Shape
from titans_lm.forecast.settings import EvaluateForecasters, TrainSettings
from titans_lm.train.loop import Interrupted
from titans_lm.train.run import RunFolder

CPU = torch.device("cpu")
SHAPE = Shape(12, 4, 2)
QUICK = {"epochs": 3, "batch_size": 16, "lr": 0.01, "device": "cpu"}


def test_nlinear_takes_the_penalty_that_is_best_on_validation():
    made, model = data(), make_model("nlinear", net(), SHAPE, None)
    settings = TrainSettings(ridge=(1e-8, 1e-2, 1e2))
    fitted = fit_model(model, made, settings)
    errors = {}
    for penalty in settings.ridge:
        other = Linear(12, 4)
        closed_form(other.map, "last", made, TrainSettings(ridge=(penalty,)))
        errors[penalty] = score(other, made.parts["validation"], CPU).mse
    assert fitted.ridge == min(errors, key=errors.__getitem__)
    assert fitted.validation.mse == pytest.approx(errors[fitted.ridge], rel=1e-6)
    assert (fitted.steps, fitted.seconds) == (0, 0.0)


def test_a_model_without_parameters_is_measured():
    made = data()
    last = SeasonalNaive(1, 12, 4)
    fitted = fit_model(last, made, TrainSettings())
    assert fitted.validation == score(last, made.parts["validation"], CPU)
    assert fitted.ridge is None


def test_a_shortcut_starts_from_its_closed_form_and_training_makes_it_no_worse():
    made = data()
    alone = Linear(12, 4, "mean", bias=False)
    closed_form(alone.map, "mean", made, TrainSettings())
    start = score(alone, made.parts["validation"], CPU).mse
    model = Forecaster(net(shortcut="ridge"), SHAPE)
    fitted = fit_model(model, made, TrainSettings(**{**QUICK, "epochs": 1, "lr": 1e-9}))
    assert fitted.validation.mse == pytest.approx(start, rel=1e-5)
    model = Forecaster(net(shortcut="ridge"), SHAPE)
    fitted = fit_model(model, made, TrainSettings(**{**QUICK, "lr": 0.5}))  # far too large: the start is the best
    assert fitted.validation.mse <= start * (1 + 1e-6)
    assert score(model, made.parts["validation"], CPU).mse == pytest.approx(fitted.validation.mse, rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_validation_is_measured_as_the_test_part_is(precision):
    made, model = data(), DLinear(12, 4)
    fitted = fit_model(model, made, TrainSettings(**QUICK, precision=precision))
    assert score(model, made.parts["validation"], CPU) == pytest.approx(fitted.validation, rel=1e-9)


def test_training_improves_and_ends_with_the_best_weights():
    made, model = data(), forecaster()
    before = score(model, made.parts["validation"], CPU)
    fitted = fit_model(model, made, TrainSettings(**QUICK))
    assert fitted.validation.mse < before.mse
    assert score(model, made.parts["validation"], CPU) == pytest.approx(fitted.validation, rel=1e-9)
    assert 0 < fitted.best_step <= fitted.steps
    assert fitted.steps <= 3 * 5


@pytest.mark.parametrize(
    ("make", "windows"),
    [
        (lambda: DLinear(12, 4), 1),
        (lambda: make_model("nlinear", net(), SHAPE, None), 1),
        (lambda: Forecaster(net(shortcut="ridge"), SHAPE), 1),
        (lambda: forecaster("lmm"), 2),
    ],
    ids=["dlinear", "ridge", "a ridge to start from", "a memory that is carried"],
)
def test_the_test_part_decides_nothing(make, windows):
    found = []
    for spoiled in (False, True):
        made = data(rows=160)
        if spoiled:
            made.scaled[made.borders["validation"].stop :] = 1e3
        torch.manual_seed(0)
        model = make()
        fit_model(model, made, TrainSettings(**{**QUICK, "epochs": 2}, windows=windows))
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_run_whose_patience_was_out_does_not_train_on(tmp_path):
    """It was stopped between its end and its result."""
    made, settings, seen = data(), TrainSettings(**{**QUICK, "epochs": 30, "lr": 1e-9}, patience=2), []

    def fitted(resume):
        torch.manual_seed(0)
        model = DLinear(12, 4)
        run = RunFolder.open(tmp_path / "run") if resume else RunFolder.create(tmp_path / "run", {})
        found = fit_model(model, made, settings, run=run)
        seen.append((tmp_path / "run" / "best.safetensors").read_bytes())
        return found

    whole = fitted(False)
    assert whole.steps < 30 * 5
    for _ in range(2):
        again = fitted(True)
        assert (again.steps, again.best_step, again.validation) == (whole.steps, whole.best_step, whole.validation)
    assert seen[0] == seen[1] == seen[2]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    made, settings = data(), TrainSettings(**QUICK, evaluations=2)

    def fitted(folder, resume=False):
        torch.manual_seed(0)
        model = DLinear(12, 4)
        run = RunFolder.open(folder) if resume else RunFolder.create(folder, {})
        return fit_model(model, made, settings, seed=1, run=run), model.state_dict()

    whole, weights = fitted(tmp_path / "whole")
    asked = iter([False] * 3 + [True] * 9)
    with monkeypatch.context() as patch:
        patch.setattr("titans_lm.train.parallel.Distributed.anybody", lambda self, wish: next(asked))
        with pytest.raises(Interrupted):
            fitted(tmp_path / "cut")
    again, others = fitted(tmp_path / "cut", resume=True)
    assert (again.validation, again.best_step, again.steps) == (whole.validation, whole.best_step, whole.steps)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_the_loss_of_several_windows_is_the_mean_over_their_forecasts(kind):
    made, model = data(), forecaster().eval()
    batch = made.parts["train"].spanning(3).batch(torch.tensor([4, 9]))
    found, _ = window_loss(model, batch, TrainSettings(loss=kind, windows=3))
    rows, state, errors = torch.cat([batch["past"], batch["future"]], dim=1), None, []
    assert rows.shape == (2, 40, 2)
    for start in (0, 12, 24):
        y, state = model.read(rows[:, start : start + 12], state)
        error = y - rows[:, start + 12 : start + 16]
        errors.append(error.square().mean() if kind == "mse" else error.abs().mean())
    torch.testing.assert_close(found, sum(errors) / 3)


def test_a_model_that_is_taught_to_go_on_is_chosen_so():
    made, model = data(rows=160), forecaster()
    fitted = fit_model(model, made, TrainSettings(**{**QUICK, "epochs": 1}, windows=2))
    assert fitted.validation == pytest.approx(score_streamed(model, made, "validation", "carried", CPU), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "got epochs=0"),
        ({"patience": 0}, "got patience=0"),
        ({"windows": 0}, "got windows=0"),
        ({"loss": "huber"}, "got loss='huber'"),
        ({"ridge": ()}, r"got ridge=\(\)"),
        ({"ridge": (0.0,)}, "got ridge=0.0"),
        ({"warmup_share": 2.0}, "got warmup_share=2.0"),
        ({"lr": -1.0}, "got lr=-1.0"),
    ],
)
def test_wrong_settings_of_training_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)


def test_rates_that_are_nearly_equal_are_two_trials(monkeypatch, tmp_path):
    folders = []

    def run_job(job, _):
        folders.append(job.folder)
        return {"wall_seconds": 0.0, "diverged": "at once"}

    monkeypatch.setattr("titans_lm.experiments.runner.run_job", run_job)
    settings = EvaluateForecasters(
        data=(write_csv(tmp_path / "waves.csv"),), models=("dlinear",), lookback=12, horizons=(3,),
        rates=(0.001, 0.0010000001), out=tmp_path / "out",
    )  # fmt: skip
    with pytest.raises(ValueError, match="dlinear at horizon 3 of waves diverged with every learning rate"):
        evaluate_forecasters(settings, lambda _: None)
    assert len(folders) == len(set(folders)) == 2


def test_a_run_that_is_to_be_streamed_is_another(tmp_path):
    settings = EvaluateForecasters()
    spec, table = model_spec("lmm", settings), write_csv(tmp_path / "t.csv")
    plain, streamed = (
        ForecastJob(spec, settings, table, 4, 0, tmp_path / "run", streaming=chosen) for chosen in (False, True)
    )
    assert plain.spec() != streamed.spec(), "else the result of before, without, would be taken for it"
