"""How long will a step take, and does compression pay?"""

from gradlab.analysis.forecast.plans import MOST_NODES, SPEED_NOISE, Forecast, NodeForecast, crowding, forecast

__all__ = ["MOST_NODES", "SPEED_NOISE", "Forecast", "NodeForecast", "crowding", "forecast"]
