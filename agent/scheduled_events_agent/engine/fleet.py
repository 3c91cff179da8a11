"""What the engine knows of the VMs that act together, and what it wishes of them."""

from collections.abc import Callable

from scheduled_events_agent.engine.parts import FleetTold
from scheduled_events_agent.settings import Settings
from scheduled_events_agent.workflow import Board, Context, Fleet, Wish, awaited_others, wishes

_NOTHING = FleetTold("", "", None, {})


class FleetPart:
    """``told`` and ``awaited`` are for any thread, the rest is for the engine's."""

    def __init__(self, wish: Callable[[tuple[Wish, ...]], None]) -> None:
        self._wish = wish
        self.told = _NOTHING
        """What the fleet's table last told."""
        self.has_news = False
        """Whether that was not decided on yet."""
        self.awaited: tuple[str, ...] = ()
        """The VMs that events of this VM wait for."""

    def take(self, told: FleetTold) -> None:
        self.told = told
        self.has_news = True

    def view(self, settings: Settings) -> Fleet | None:
        """What the workflow reads; None if this VM acts alone."""
        fleet = settings.fleet
        if self.told.settings != fleet:
            self.told = _NOTHING  # another table, other VMs
        if fleet is None:
            return None
        told = self.told
        return Fleet(
            max_events=fleet.max_events,
            expect=fleet.expect,
            when_away=fleet.when_away,
            failure=told.failure,
            away_since=told.away_since,
            standings=told.standings,
        )

    def committed(self, board: Board, context: Context) -> None:
        """What was decided is on disk: tell the fleet."""
        self.has_news = False
        if context.fleet is None or context.document_at is None:
            return
        waiting = [w for w in board.values() if w.waits and w.waits.kind == "all_ready"]
        self.awaited = tuple(dict.fromkeys(name for one in waiting for name in awaited_others(one, context)))
        self._wish(wishes(board, context))
