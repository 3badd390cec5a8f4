"""How long will a step take, and does compression pay?"""

from gradlab.analysis.forecast.network import MOST_NODES, Network
from gradlab.analysis.forecast.plans import SPEED_NOISE, Forecast, NodeForecast, forecast

__all__ = ["MOST_NODES", "SPEED_NOISE", "Forecast", "Network", "NodeForecast", "forecast"]
