"""titans forecast: time series from CSV files, forecast by models with a memory and by others."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from titans_lm.commands.show import say, show, write_result
from titans_lm.forecast.settings import EvaluateForecasters, PredictSettings, TrainForecaster

Forecasting = (
    Annotated[TrainForecaster, tyro.conf.subcommand("train", default=TrainForecaster())]
    | Annotated[EvaluateForecasters, tyro.conf.subcommand("evaluate", default=EvaluateForecasters())]
    | Annotated[PredictSettings, tyro.conf.subcommand("predict", default=PredictSettings())]
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast time series: fit models to CSV files, compare their errors, and write forecasts with a plot."""

    what: Annotated[tyro.conf.OmitSubcommandPrefixes[Forecasting], tyro.conf.arg(name="")] = tyro.MISSING


def run_forecast(command: Forecast) -> None:
    from titans_lm.forecast.table import check_pandas

    check_pandas()
    settings = command.what
    tell = (lambda _: None) if settings.quiet else say
    match settings:
        case TrainForecaster():
            from titans_lm.forecast.evaluate import train_forecaster

            result = train_forecaster(settings, tell)
            told = f"model in {result['model']}; go on with: titans forecast predict {settings.out} {settings.data}"
        case EvaluateForecasters():
            from titans_lm.forecast.evaluate import FILE, evaluate_forecasters, lines

            result = evaluate_forecasters(settings, tell)
            told = "\n".join([*lines(result), f"numbers in {settings.out / FILE}"])
        case _:
            from titans_lm.forecast.predict import predict

            result, told = predict(settings), ""
    write_result(settings.json, result)
    if told:
        tell(told)
    elif not settings.quiet:
        show(result)
