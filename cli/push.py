"""`engram-graft push`: a graft or merged directory onto the Hugging Face hub."""

from typing import Annotated

import typer

from engram_graft.cli.common import Json, emit, examples, quiet

HELP_END = examples("engram-graft push runs/demo user/name", "engram-graft push runs/merged user/name --public")


def command(
    directory: Annotated[str, typer.Argument(help="A graft or merged directory.")],
    repo: Annotated[str, typer.Argument(help='Its name on the hub, "user/name"; made if it is not there.')],
    public: Annotated[bool, typer.Option("--public", help="Let everybody read it; private by default.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.", show_default="main")] = None,
    json: Json = False,
) -> None:
    """Check a graft or merged directory and put it on the hub; load_graft("user/name") opens it from there."""
    from engram_graft.hub import push_to_hub

    quiet()
    report = push_to_hub(directory, repo, private=not public, revision=revision)
    if json:
        emit(report)
        return
    print(f"pushed    {len(report['files'])} files to {report['repo_id']} ({'private' if report['private'] else 'public'})")
    for name in report["removed"]:
        print(f"removed   {name}, which is no longer in {directory}")
    print(f"commit    {report['url']}")
    print(f'load      engram_graft.load_graft("{report["repo_id"]}")')
