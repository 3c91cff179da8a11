"""An event that no longer names this VM is over for it; by another rule, other names or a start it is not."""

from datetime import timedelta

import pytest
from test_workflow import Agent, a_rule, an_event, started

from scheduled_events_agent.imds.document import Document
from scheduled_events_agent.policy import When

DAY = 86400.0
ELSEWHERE = an_event(resources=("vm_2",))
EVERYWHERE = an_event(resources=())
SHARED = an_event(resources=("vm_1", "vm_2"))


def prepared(**context: object) -> Agent:
    agent = Agent(a_rule(prepare=("drain",), approve="manual", lead=DAY), **context)
    agent.document(an_event())
    agent.ends("drain")
    return agent


@pytest.mark.parametrize("first", [an_event(), SHARED])
def test_two_answers_that_name_other_vms_end_it(first: object) -> None:
    agent = prepared()
    agent.document(first)  # type: ignore[arg-type]
    phase = agent.phase
    assert agent.answer_once(ELSEWHERE) == []
    assert agent.phase == phase
    assert agent.wait_message() == "it is not in the last document, and the next one shows whether it is over"
    assert agent.answer_once(ELSEWHERE) == ["A: recover resume"]
    assert agent.of().outcome == "canceled"
    assert agent.answer_once(ELSEWHERE) == []
    agent.ends("resume")
    assert agent.workflows == {}
    assert [line for line in agent.journal if "VM" in line][-2:] == [
        "missing: does not name this VM any more; over for it, if the next answer does not name it either",
        "gone: names only other VMs now (canceled)",
    ]


def test_one_answer_does_not_end_it() -> None:
    agent = prepared()
    for _ in range(3):
        agent.answer_once(ELSEWHERE)
        agent.answer_once(an_event())
    agent.answer_once(ELSEWHERE)
    agent.answer_once(ELSEWHERE, after=0.5)  # not yet another poll
    assert agent.phase == "prepared"
    assert agent.answer_once(an_event()) == []
    assert agent.wait_message() == "an operator must approve it"


def test_if_it_names_this_vm_again_it_is_another_event() -> None:
    agent = prepared()
    other = an_event(id="B")
    agent.document(an_event(), other)
    agent.document(ELSEWHERE, other)  # B needs what is prepared, so nothing is undone yet
    old = agent.of()
    assert (old.phase, agent.wait_message()) == ("recovering", "event B still needs it prepared")
    assert agent.document(an_event(), other) == ["A: prepare drain"]
    assert [one.id != old.id for one in agent.all_of("A")] == [False, True]


def test_an_event_that_names_no_vm_has_not_left() -> None:
    agent = prepared()
    agent.document(EVERYWHERE)
    agent.document(EVERYWHERE)
    assert agent.phase == "held"
    agent.document(ELSEWHERE)
    agent.document(ELSEWHERE)  # it did not name this VM before, either
    assert not agent.of().is_over


def test_an_event_that_has_started_is_followed_until_it_is_gone() -> None:
    agent = prepared()
    agent.document(started(an_event()))
    for event in (started(ELSEWHERE), ELSEWHERE):
        agent.document(event)
        agent.document(event)
    assert (agent.phase, agent.of().is_over) == ("started", False)
    assert agent.document() == ["A: recover resume"]


def test_an_event_of_a_vm_that_got_another_name_is_followed() -> None:
    agent = prepared()
    agent.reload(*agent.context.rules, names=("vm_9",))
    agent.document(an_event())
    agent.document(an_event(description="another"))
    agent.document(ELSEWHERE)
    assert not agent.of().is_over


def test_an_event_knows_the_name_by_which_it_named_this_vm() -> None:
    agent = prepared()
    rules = agent.context.rules
    assert (agent.of().named_as, agent.of().is_named_otherwise) == ("vm_1", False)
    agent.reload(*rules, names=("vm_9",))
    for _ in range(24):
        agent.answer_once(an_event())
    assert (agent.phase, agent.of().named_as, agent.of().is_named_otherwise) == ("held", "vm_1", True)
    assert agent.wait_message() == "it names vm_1, which is no name of this VM any more"
    agent.reload(*rules, names=("vm_9", "VM_1"))
    assert not agent.of().is_named_otherwise
    assert agent.wait_message() == "an operator must approve it"
    agent.reload(*rules, names=("vm_9",))
    assert agent.document() == ["A: recover resume"]
    agent.ends("resume")
    assert agent.workflows == {}


def test_an_event_that_never_named_this_vm_is_not_named_otherwise() -> None:
    agent = Agent(a_rule(prepare=("drain",), when=When(affects=("others",))))
    agent.document(ELSEWHERE)
    assert (agent.of().named_as, agent.of().is_named_otherwise) == ("", False)
    unnamed = Agent(a_rule(), names=())
    unnamed.document(an_event())
    assert (unnamed.of().named_as, unnamed.of().is_named_otherwise) == ("", False)
    unnamed.reload(a_rule(), names=("vm_1",))
    assert unnamed.of().named_as == "vm_1"


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_rule_for_events_of_other_vms_goes_on_with_it(*, is_taken: bool) -> None:
    types = ("Reboot",) if is_taken else ("Freeze",)
    others = a_rule(name="others", when=When(affects=("others",), type=types))  # type: ignore[arg-type]
    agent = Agent(a_rule(prepare=("drain",), approve="manual", lead=DAY), others)
    agent.document(an_event())
    agent.ends("drain")
    agent.document(ELSEWHERE)
    agent.document(ELSEWHERE)
    assert any(one.is_over for one in agent.all_of("A")) is not is_taken


def test_a_restart_between_the_answers_counts_them_anew() -> None:
    agent = prepared()
    agent.answer_once(ELSEWHERE)
    agent.restart(document=False)
    assert agent.answer_once(ELSEWHERE) == []
    assert agent.answer_once(ELSEWHERE) == ["A: recover resume"]


def test_a_hold_counts_when_it_names_this_vm_again() -> None:
    agent = prepared()
    agent.operator("hold")
    agent.document(ELSEWHERE)
    agent.ends("resume")
    assert agent.workflows == {}
    agent.wait(timedelta(hours=1).total_seconds())
    assert agent.document(an_event()) == []
    assert (agent.phase, agent.of().operator_action) == ("held", "hold")


def test_an_event_of_other_vms_listed_in_a_skipped_document_is_not_missing_twice() -> None:
    """Two answers may come before the agent decides: the first of them counts for what it lists."""
    other = a_rule(when=When(affects=("others",)), prepare=("drain",), approve="never", lead=DAY)
    agent = Agent(other)
    agent.document(ELSEWHERE)
    agent.answer_once()
    document = Document(incarnation="1", events=(ELSEWHERE,))
    agent.documents.receive(document, agent.context.now.timestamp() + 1, agent.context.names)
    assert agent.answer_once(after=2) == []
    assert not agent.of().is_over
    assert agent.answer_once() != []


def test_an_event_of_other_vms_keeps_its_workflow_under_a_new_id_without_its_rule() -> None:
    agent = Agent(a_rule(when=When(affects=("others",)), prepare=("drain",), approve="never", lead=DAY))
    agent.document(ELSEWHERE)
    agent.ends("drain")
    agent.reload(a_rule(name="own"))
    renamed = started(an_event(id="B", resources=("vm_2",)))
    assert agent.document(renamed) == []
    assert agent.of("B").phase == "started"
    assert agent.document() == ["A: recover resume"]
