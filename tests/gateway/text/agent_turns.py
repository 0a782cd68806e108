"""Conversations as agents and chat programs send them, which some chat templates refuse."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.request import Conversation, MadeCall, Message, Tool

TOOLS = [
    Tool(
        name="run",
        description="Runs a command.",
        parameters={"type": "object", "properties": {"command": {"type": "string"}}},
    ),
    Tool(name="read", parameters={"type": "object", "properties": {}}),
]
BRIEF = Message("system", "Be brief.")
CAREFUL = Message("system", "Be careful.")
TASK = Message("user", "Write 42 into a file.")
THEN = Message("user", "And then?")
DONE = Message("assistant", "It is written.")
RUN, READ = (
    MadeCall("call00001", "run", {"command": "echo 42 > f"}),
    MadeCall("call00002", "read", {}),
)
CALLED = Message("assistant", calls=[RUN])
RESULT = Message("tool", "written", call_id=RUN.id)
READ_RESULT = Message("tool", "42", call_id=READ.id)

TURNS: Mapping[str, Conversation] = {
    "system and user": Conversation([BRIEF, TASK]),
    "several systems": Conversation([BRIEF, CAREFUL, TASK]),
    "a system in the middle": Conversation([BRIEF, TASK, DONE, CAREFUL, THEN]),
    "a system last": Conversation([BRIEF, TASK, CAREFUL]),
    "a system alone": Conversation([BRIEF]),
    "two users": Conversation([BRIEF, TASK, THEN]),
    "two assistants": Conversation([TASK, DONE, DONE, THEN]),
    "an assistant first": Conversation([DONE, THEN]),
    "tools": Conversation([BRIEF, TASK], TOOLS),
    "tools without a system": Conversation([TASK], TOOLS),
    "a call": Conversation([TASK, CALLED, RESULT], TOOLS),
    "two calls": Conversation(
        [BRIEF, TASK, Message("assistant", calls=[RUN, READ]), RESULT, READ_RESULT], TOOLS
    ),
    "a call with a text and a thought": Conversation(
        [
            TASK,
            Message("assistant", "One moment.", reasoning="A tool.", calls=[RUN]),
            RESULT,
            DONE,
            THEN,
        ],
        TOOLS,
    ),
    "a result and a text": Conversation([TASK, CALLED, RESULT, THEN], TOOLS),
    "a call without a result": Conversation([TASK, CALLED, THEN], TOOLS),
    "calls and no tools": Conversation([TASK, CALLED, RESULT, DONE, THEN]),
    "instructions after the task": Conversation([BRIEF, TASK, CAREFUL, CALLED, RESULT], TOOLS),
    "instructions and surroundings": Conversation(
        [BRIEF, CAREFUL, THEN, TASK, CALLED, RESULT, DONE, THEN], TOOLS
    ),
    "a system between a call and its result": Conversation(
        [BRIEF, TASK, CALLED, CAREFUL, RESULT], TOOLS
    ),
    "an answer that is begun": Conversation(
        [BRIEF, TASK, Message("assistant", "It is ")],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
}
