"""Scripts of bash as people write them, read without being run."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto_interop.frameworks.bash import commands, parameters, unknown_in


def command_lines(text: str, *arguments: str, **variables: str) -> list[str]:
    """The words of every command, joined."""
    environment = {**parameters(arguments), **variables}
    return [" ".join(command.argv) for command in commands(text, "run.sh", environment)]


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("A=2\ncd /x && A=1\necho $A", "1"),
        ("A=2\ncd /x || exit 1\necho $A", "2"),
        ("A=2\ncd /x || { echo no; exit 1; }\necho $A", "2"),
        ("[ -d /x ] && mkdir /x\necho on", "on"),
        ("[[ -d /x || $A < b ]] || mkdir /x\necho on", "on"),
        ("if [ ! -f x ]; then echo no pretrain_gpt.py; exit 1; else cd x; fi\necho on", "on"),
        ('if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then\n  echo run\nfi', "run"),
        ("python x.py --a 1 > log.txt 2>&1 < /dev/null | tee log", "tee log"),
        ("set -ex; echo $@", "mine"),
        ('eval "A=3"; echo $A', "3"),
        (": ${A:=4}; echo $A", "4"),
        ("export A=1 B='2 3' # both\necho $A \\\n  $B", "1 2 3"),
        ("declare -a A=(1 '2 3')\nA+=(4)\necho ${A[1]} ${A[@]}", "2 3 1 2 3 4"),
        ('A="x\\"y"; echo $A', 'x"y'),
    ],
)
def test_the_last_command(text: str, out: str) -> None:
    assert command_lines(text, "mine")[-1].removeprefix("echo ") == out


def test_what_is_redirected_is_no_argument() -> None:
    assert command_lines("python x.py --a 1 > log.txt 2>&1 &> all 2> errors")[0] == "python x.py --a 1"


def test_positional_words_are_those_behind_the_script() -> None:
    text = 'echo "$1" ${2:-none} "${3:-none}" $#\npython x.py "$@"'
    assert command_lines(text, "a", "b c") == ["echo a b c none 2", "python x.py a b c"]
    assert command_lines('python x.py "$@" --b') == ["python x.py --b"]


def test_a_text_holds_commands() -> None:
    options = 'options="--lr 1e-4 \\\n  --bf16"\nrun="python pretrain_gpt.py ${options}"\n'
    once = "python pretrain_gpt.py --lr 1e-4 --bf16"
    assert (
        command_lines(f'{options}srun -l --nodes=4 bash -c "${{run}}" > log')[-1]
        == f"srun -l --nodes=4 {once}"
    )
    assert command_lines(f"{options}eval $run")[-1] == once


@pytest.mark.parametrize("value", ["$(nvidia-smi -L | wc -l)", "$((8 * NODES))", "${A%.*}", "`date`"])
def test_what_only_running_would_tell_is_one_unknown(value: str) -> None:
    argv = list(commands(f"N={value}\ntorchrun --n $N", "run.sh"))[-1].argv
    assert (len(argv), unknown_in(argv[2])) == (3, value)


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("if [ -d /x ]; then ARGS+=(--bf16); fi", "if [ -d /x ]; then ARGS+=(--bf16); fi"),
        ("if [ $A = 2 ]; then :; else export B=1; fi", "if [ $A = 2 ]; then :; else export B=1; fi"),
        ('[ -d /x ] && ARGS="--bf16"', '[ -d /x ] && ARGS="--bf16"'),
        ("[[ $X == y* ]] && A=1", "[[ $X == y* ]] && A=1"),
        ("A=2; cd /x || A=1", "cd /x || A=1"),
        ("[ -d /x ] && { echo no; A=5; }", "[ -d /x ] && { echo no; A=5; }"),
        ("if nvcc; then torchrun pretrain_gpt.py; fi", "if nvcc; then torchrun pretrain_gpt.py; fi"),
        ("cd /x || torchrun pretrain_gpt.py", "cd /x || torchrun pretrain_gpt.py"),
    ],
)
def test_what_depends_on_a_test_is_an_error(text: str, test: str) -> None:
    with pytest.raises(StrettoError) as caught:
        command_lines(f"A=3\n{text}\necho on")
    statement = "the launch" if "pretrain" in text else "an assignment"
    assert caught.value.message == f"run.sh:2: {statement} depends on a test, and tests are not read: {test}"
    assert "put `echo` before the launch" in str(caught.value.hint)
    assert "stretto migrate --run" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "construct"),
    [
        ("for i in 1 2; do ARGS=(--bf16); done", "for"),
        ("while [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2 ;; esac; done", "while"),
        ("case $1 in a) A=1 ;; esac", "case"),
        ("function f { A=1; }", "function"),
        ("train () {\n  torchrun pretrain_gpt.py\n}", "a function"),
        ("f() ( echo )", "a function"),
        ("(A=1; echo $A)", "("),
        ("A=3; ((A++))", "(("),
        ("A=3; read A", "read"),
        ("A=3; let A=A+1", "let"),
        ("A=3; A[1]=4", "A"),
        ("A=3; unset A", "unset"),
        ("set -- a b", "set"),
        ("shift", "shift"),
        ("printf -v A 3", "printf"),
        ("if true; then for i in 1; do A=1; done; fi", "for"),
    ],
)
def test_what_is_not_read_is_one_error_that_says_what_to_give(text: str, construct: str) -> None:
    with pytest.raises(StrettoError) as caught:
        command_lines(f"B=1\n{text}\ntorchrun pretrain_gpt.py")
    message, line = caught.value.message, text.partition("\n")[0]
    assert message.startswith(f"run.sh:2: `{construct}` is not read: ")
    assert line.endswith(message.partition("not read: ")[2])
    assert "stretto migrate --run" in str(caught.value.hint)


def test_what_a_script_leaves_to_others_is_noted() -> None:
    notes = list[str]()
    list(commands("source env.sh\nexit 1\necho on", "run.sh", notes=notes))
    assert notes == [
        "run.sh:1: env.sh is not read: what it sets is not known",
        "run.sh:2: the script ends there as it is started, and is read on: exit 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('echo "a ` b"', "run.sh:1: a quote ` that does not end"),
        ("echo on\necho a\0b", "run.sh:2: a NUL byte"),
        ("echo ${A:-'x}", "run.sh:1: a quote ' that does not end"),
        ("echo on\n[[ -n $A\n", "run.sh:2: [[ that does not end"),
        ("fi", "run.sh:1: fi without if"),
        ("cat <<EOF > f\nx\nEOF", "run.sh:1: a here-document is not read"),
        ("x" * (1 << 20) + "x", "run.sh has 1,048,577 characters"),
        ("A=xxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A\n" * 9, "more than 4,194,304 characters"),
        ("A=(x)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40, "more than 4,194,304 characters"),
        ("echo " + "${A:-" * 3000 + "}" * 3000, "in each other, over 40 deep"),
        ('A=\'eval "$A"\'\neval "$A"', "in each other, over 40 deep"),
    ],
)
def test_a_script_that_is_none_is_one_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        command_lines(text)
    assert message in caught.value.message
    assert len(str(caught.value)) < 4300
