"""titans forecast: time series from CSV files, forecast by models with a memory and by others."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from titans_lm.commands.show import Chosen, lines_of, say, write_result
from titans_lm.forecast.settings import EvaluateForecasters, PredictSettings, TrainForecaster

Forecasting = (
    Annotated[TrainForecaster, tyro.conf.subcommand("train", default=TrainForecaster())]
    | Annotated[EvaluateForecasters, tyro.conf.subcommand("evaluate", default=EvaluateForecasters())]
    | Annotated[PredictSettings, tyro.conf.subcommand("predict", default=PredictSettings())]
)


@dataclass(frozen=True, kw_only=True)
class Forecast(Chosen):
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
