"""The simulator's control page in a real browser: clicks, a phone, light and dark, hostile texts."""

import sys
from collections.abc import Iterator

import pytest

if sys.platform == "win32":
    pytest.skip("the browser comes from Debian's packages", allow_module_level=True)

from chromium import Browser, Tab, browser

from scheduled_events_agent.simulator import Simulator
from scheduled_events_agent.simulator.control import Control

HOSTILE = "<script>window.ran=1</script><img src=x onerror=window.ran=2> </script></style> \u202ex " + "x" * 3000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def azure(chromium: Browser) -> Iterator[Simulator]:  # noqa: ARG001 - the browser starts before there are threads
    with Simulator(vms=("web_0", "web_1")) as running:
        yield running


@pytest.fixture
def url(azure: Simulator) -> Iterator[str]:
    with Control(azure) as control:
        yield control.url


def open_page(chromium: Browser, url: str, width: int = 1280, *, is_dark: bool = False) -> Tab:
    tab = chromium.tab()
    tab.look(width, is_dark=is_dark)
    tab.open(url)
    tab.wait("document.body.dataset.state === 'live'")
    return tab


def test_the_page_advances_an_event_manually(chromium: Browser, azure: Simulator, url: str) -> None:
    tab = open_page(chromium, url)
    tab.ask(
        "const form = document.getElementById('schedule').elements; form.type.value = 'Redeploy';"
        "form.vms.value = 'web_0, web_1'; form.notice.value = '10m'; form.lasts.value = 'null';"
        "form.start_delay.value = '1h'; document.querySelector('#schedule button').click()"
    )
    card = "(document.querySelector('#events .card')?.innerText ?? '')"
    assert "Platform, for web_0, web_1; not yet seen by a VM" in tab.wait(
        f"{card}.includes('Scheduled') && {card}"
    )
    (event,) = azure.events()
    assert (event.plan.type, event.plan.vms, event.plan.lasts_seconds) == ("Redeploy", ("web_0", "web_1"), None)
    assert tab.wait("document.querySelector('[data-until]').textContent.startsWith('in ') && 'yes'") == "yes"

    for button, seen in (("approve", "approved by the portal"), ("start", "Started"), ("end", "completed")):
        tab.ask(
            f"[...document.querySelectorAll('#events button')].find(b => b.textContent === '{button}').click()"
        )
        tab.wait(f"{card}.includes('{seen}')")
    assert azure.event(event.id).outcome == "completed"
    assert tab.complaints == []


def test_the_page_injects_and_clears_faults_and_shows_an_error(
    chromium: Browser, azure: Simulator, url: str
) -> None:
    tab = open_page(chromium, url)
    tab.ask(
        "const fault = document.getElementById('fault'); fault.elements.kind.value = 'status';"
        "fault.elements.status.value = '410'; fault.elements.vms.value = 'web_1'; fault.requestSubmit()"
    )
    tab.wait("document.getElementById('vms').innerText.includes('status 410 on any')")
    assert azure.faults("web_0") == ()
    tab.ask("document.getElementById('clear').click()")
    tab.wait("!document.getElementById('vms').innerText.includes('status 410')")
    assert azure.faults("web_1") == ()

    tab.ask("fault.elements.for.value = 'soon'; fault.requestSubmit()")
    assert tab.wait("document.getElementById('trouble').textContent") == (
        'fault: for: expected a duration such as 9s, 5m, 1h30m or 2d; got "soon"'
    )


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_the_placeholder_of_an_empty_field_fits(chromium: Browser, url: str, width: int) -> None:
    tab = open_page(chromium, url, width)
    cut_off = tab.ask(
        "document.querySelector('details').open = true;"
        "const pen = document.createElement('canvas').getContext('2d');"
        "[...document.querySelectorAll('input[placeholder]')].filter((field) => {"
        "  const style = getComputedStyle(field); pen.font = style.font;"
        "  const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);"
        "  return pen.measureText(field.placeholder).width > room;"
        "}).map((field) => field.placeholder)"
    )
    assert tab.ask("document.querySelectorAll('input[placeholder]').length") > 5
    assert cut_off == []


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_hostile_texts_do_nothing_and_nothing_overflows(
    chromium: Browser, azure: Simulator, url: str, width: int, is_dark: bool
) -> None:
    azure.schedule("Freeze", description=HOSTILE, id_=HOSTILE[:900])
    azure.fault(None, "stall", count=3)
    tab = open_page(chromium, url, width, is_dark=is_dark)
    tab.wait("document.getElementById('events').innerText.includes('onerror')")

    assert tab.ask("window.ran === undefined")
    assert tab.ask("document.querySelectorAll('main img, main script').length") == 0
    assert tab.ask("document.documentElement.scrollWidth") <= width
    light = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert light == ("rgb(20, 23, 26)" if is_dark else "rgb(245, 246, 248)")
    assert tab.complaints == []


def test_a_stopped_simulator_is_reported(chromium: Browser, azure: Simulator) -> None:
    with Control(azure) as control:
        tab = open_page(chromium, control.url)
    tab.wait("document.body.dataset.state === 'lost'")
    assert tab.ask("document.getElementById('about').textContent") == (
        "The simulator does not answer; is it still running?"
    )
