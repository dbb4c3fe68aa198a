"""titans forecast: time series from CSV files, forecast by models with a memory and by others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import lines_of, say, write_result
from titans_lm.forecast.settings import EvaluateForecasters, PredictSettings, TrainForecaster


@dataclass(frozen=True, kw_only=True)
class ForecastTrain(TrainForecaster):
    """Fit a model to a table: best on validation, tested once, saved with its scaler."""

    data: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


@dataclass(frozen=True, kw_only=True)
class ForecastEvaluate(EvaluateForecasters):
    """Fit and test models on tables, horizon by horizon, and show their errors side by side."""

    data: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ()


@dataclass(frozen=True, kw_only=True)
class ForecastPredict(PredictSettings):
    """Forecast a table with a fitted model: a CSV file, and a plot of history, forecast and truth."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    data: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None


Forecasting = (
    Annotated[ForecastTrain, tyro.conf.subcommand("train", default=ForecastTrain())]
    | Annotated[ForecastEvaluate, tyro.conf.subcommand("evaluate", default=ForecastEvaluate())]
    | Annotated[ForecastPredict, tyro.conf.subcommand("predict", default=ForecastPredict())]
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast time series: fit models to CSV files, compare their errors, and write forecasts with a plot."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Forecasting], tyro.conf.arg(name="")] = tyro.MISSING


def run_forecast(command: Forecast) -> None:
    settings = command.what
    from titans_lm.forecast import evaluate, predict, table

    table.check_pandas()
    tell = (lambda _: None) if settings.quiet else say
    if isinstance(settings, TrainForecaster):
        result = evaluate.train_forecaster(settings, tell)
        lines = [f"model in {result['model']}; go on with: titans forecast predict {settings.out} {settings.data}"]
    elif isinstance(settings, EvaluateForecasters):
        result = evaluate.evaluate_forecasters(settings, tell)
        lines = [*evaluate.lines(result), f"numbers in {settings.out / evaluate.FILE}"]
    else:
        result = predict.predict(settings)
        lines = lines_of(result)
    write_result(settings.json, result)
    tell("\n".join(lines))
