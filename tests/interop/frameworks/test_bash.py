"""Scripts of bash as people write them, read without being run."""

from __future__ import annotations

import pytest

from stretto.errors import StrettoError
from stretto_interop.frameworks.bash import commands, parameters, unknown_in


def said(text: str, *words: str, **variables: str) -> list[str]:
    """The words of every command, joined."""
    known = {**parameters(words), **variables}
    return [" ".join(command.argv) for command in commands(text, "run.sh", known)]


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ('[ -z "$B" ] && B=5\necho $B', "5"),
        ('A=1\n[ -n "$A" ] || A=7\necho $A', "1"),
        ("A=2\ncd /x || A=1\necho $A", "2"),
        ('A=3\nif [[ "$A" == "2" ]] || [ "$A" -eq 3 ]; then B=yes; else B=no; fi\necho $B', "yes"),
        ('A=3\nif [[ "$A" == "3" ]] && [ "$A" -eq 2 ]; then B=yes; else B=no; fi\necho $B', "no"),
        ('A=1; C=c\nif [[ "$A" == "1" && -n "$C" ]]; then D=both; fi\necho $D', "both"),
        ('A=1\nif [[ "$A" == "2" || -z "$A" ]]; then D=one; else D=none; fi\necho $D', "none"),
        ("if [ ! -f x ]; then echo no pretrain_gpt.py; exit 1; fi\necho on", "on"),
        ("cat <<EOT > ds.json\n{ 'a': 1, }\nEOT\necho on", "on"),
        ("python x.py --a 1 > log.txt 2>&1 < /dev/null | tee log", "tee log"),
    ],
)
def test_the_last_command(text: str, out: str) -> None:
    last = said(text)[-1]
    assert last.removeprefix("echo ") == out


def test_what_is_redirected_is_no_argument() -> None:
    assert said("python x.py --a 1 > log.txt 2>&1 &> all 2> errors")[0] == "python x.py --a 1"


def test_positional_words_are_those_behind_the_script() -> None:
    text = 'echo "$1" ${2:-none} "${3:-none}" $#\npython x.py "$@"'
    assert said(text, "a", "b c") == ["echo a b c none 2", "python x.py a b c"]
    assert said('python x.py "$@" --b') == ["python x.py --b"]


def test_a_text_and_a_document_hold_commands() -> None:
    options = 'options="--lr 1e-4 \\\n  --bf16"\nrun="python pretrain_gpt.py ${options}"\n'
    once = "python pretrain_gpt.py --lr 1e-4 --bf16"
    assert said(f'{options}srun -l --nodes=4 bash -c "${{run}}" > log')[-1] == f"srun -l --nodes=4 {once}"
    assert said(f"{options}srun bash <<EOF\n  $run\nEOF\n")[-1] == f"srun bash {once}"
    assert said(f"{options}cat > job.sh <<EOF\n$run\nEOF\nsbatch job.sh")[0] == once
    plain = "A=1\nbash <<'EOF'\necho \"$A\" --b\nEOF\n"
    assert said(plain) == ["bash echo 1 --b"]


def test_what_only_running_would_tell_is_unknown() -> None:
    text = "if [ -d /scratch ]; then DIR=/scratch; fi\necho $DIR"
    assert unknown_in(said(text)[-1]) == "DIR"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("if [ -d /x ]; then ARGS+=(--bf16); fi", "nothing tells whether `if [ -d /x ]` holds"),
        ('[ -d /x ] && ARGS="--bf16"', "nothing tells whether what stands before && or || holds"),
        ("cat <<EOF\nnever ended", "a document <<EOF that does not end"),
    ],
)
def test_arguments_that_may_be_there_or_not_are_an_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        said(text)
    assert message.replace("`if ", "`") in caught.value.message.replace("`if ", "`")


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("A=1; [ 1 -eq 2 ] && { echo no; A=5; }\necho $A", "echo 1"),
        ("A=1; [ 1 -eq 2 ] || { echo no; A=5; }\necho $A", "echo 5"),
        ("A=1; if [ $A = 1 ]; then [ $A = 1 ] && [ $A = 2 ] && A=3; A=4; fi\necho $A", "echo 4"),
        ("set -ex; echo $@", "echo mine"),
        ('eval "A=3"; echo $A', "echo 3"),
        (": ${A:=4}; echo $A", "echo 4"),
        ("echo $((-7 / 2)) $((-7 % 3))", "echo -3 -1"),
        ('A="x\\"y"; cat <<EOF > f\n\\"$A\nEOF\necho $A', 'echo x"y'),
    ],
)
def test_commands_do_what_they_do_in_bash(text: str, out: str) -> None:
    assert said(text, "mine")[-1] == out


@pytest.mark.parametrize(
    "text",
    [
        'A=$(nvidia-smi -L | wc -l); if [ -z "$A" ]; then A=8; fi',
        "A=3; [[ $X == y* ]] && A=1",
    ],
)
def test_what_is_set_where_nothing_tells_is_unknown(text: str) -> None:
    assert unknown_in(said(f"{text}\necho $A")[-1]) is not None


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
        said(f"B=1\n{text}\ntorchrun pretrain_gpt.py")
    message, line = caught.value.message, text.partition("\n")[0]
    assert message.startswith(f"run.sh:2: `{construct}` is not read: ")
    assert line.endswith(message.partition("not read: ")[2])
    assert "stretto migrate --run" in str(caught.value.hint)


def test_what_is_not_read_may_stand_in_a_branch_that_is_not_taken() -> None:
    assert said("A=1\nif [ $A = 2 ]; then for i in 1; do A=3; done; fi\necho $A")[-1] == "echo 1"


def test_a_command_with_blanks_is_one_unknown() -> None:
    words = list(commands("N=$(nvidia-smi -L | wc -l)\ntorchrun --n $N", "run.sh"))[-1].argv
    assert (len(words), unknown_in(words[2])) == (3, "$(nvidia-smi -L | wc -l)")


def test_what_a_script_leaves_to_others_is_noted() -> None:
    notes = list[str]()
    list(commands('source env.sh\n[ -z "$A" ] && exit 1\necho on', "run.sh", notes=notes))
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
        ("x" * (1 << 20) + "x", "run.sh has 1,048,577 characters"),
        ("A=xxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A\n" * 9, "more than 4,194,304 characters"),
        ("A=(x)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40, "more than 4,194,304 characters"),
        ("echo " + "${A:-" * 3000 + "}" * 3000, "in each other, over 40 deep"),
        ('A=\'eval "$A"\'\neval "$A"', "in each other, over 40 deep"),
        ("A=$((" + "9*" * 400 + "9))", "is not read"),
    ],
)
def test_a_script_that_is_none_is_one_error(text: str, message: str) -> None:
    with pytest.raises(StrettoError) as caught:
        said(text)
    assert message in caught.value.message
    assert len(str(caught.value)) < 4300
