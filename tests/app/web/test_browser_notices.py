"""Notices on the screen Machine, in Chromium: filled in, kept and never shown again, and tried."""

from __future__ import annotations

import email
import email.policy
import json
import os
import stat
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.browser import opened, recorded, serving, until_so, visit
from tests.launcher.test_notices import SECRET, Hook, answers, hooked

pytestmark = pytest.mark.slow


def said(page: Page, text: str) -> None:
    page.locator("#notice-said", has_text=text).wait_for()


def test_a_webhook_a_command_and_mail_are_kept_private_and_tried(tmp_path: Path, browser: Browser):
    sendmail, config = tmp_path / "bin" / "sendmail", tmp_path / "config" / "shardstudio" / "notices.json"
    sendmail.parent.mkdir()
    sendmail.write_text(f"#!/bin/sh\ncat > {tmp_path}/mail\n")
    sendmail.chmod(0o700)
    run = recorded(tmp_path / "runs", "fox-20261130-120000-abcd")
    run.report.write_text("")
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": f"{sendmail.parent}:{os.environ['PATH']}"}
    with (
        hooked() as hook,
        serving(tmp_path / "runs", environment=environment) as server,
        opened(browser, server.url) as page,
    ):
        visit(page, "machine")
        page.locator("#notices", has_text="whoever runs or reads the place that you name sees them").wait_for()
        page.get_by_label("Webhook", exact=True).fill("not an address")
        page.locator("#notices-save").click()
        said(page, "Webhook: is not an address that begins with https:// or http://")
        assert not config.exists()
        page.get_by_label("Webhook", exact=True).fill(hook.url)
        page.locator("[data-try=webhook]").click()
        said(page, "Sent by webhook: “fox has finished”.")
        fills_in_and_tries(page, hook, server.origin)
        page.get_by_label("Command", exact=True).fill(f"touch '{tmp_path}/a file'")
        page.locator("[data-try=command]").click()
        said(page, "Sent by command")
        assert (tmp_path / "a file").exists()
        page.get_by_label("Mail to", exact=True).fill(f"{SECRET}@example.org")
        page.locator("[data-try=mail]").click()
        said(page, "Sent by mail")
        mail = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
        assert mail["Subject"] == "fox has finished" and len(list(mail.iter_attachments())) == 1

        page.reload()
        expect(page.get_by_label("Webhook", exact=True)).to_have_attribute(
            "placeholder", "Saved, and not shown. Type to replace it"
        )
        assert SECRET not in page.content()
        kept = json.loads(config.read_text())
        assert (kept["webhook"], kept["mail"]) == (hook.url, f"{SECRET}@example.org")
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        hook.behave = answers(500)
        page.locator("[data-try=webhook]").click()
        said(page, "webhook: answered 500, an error of the server; try again later")
        page.locator("[data-remove=webhook]").click()
        page.locator("#notices-save").click()
        said(page, "Saved.")
        assert json.loads(config.read_text()) == {**kept, "webhook": ""}
    assert SECRET not in server.log


def fills_in_and_tries(page: Page, hook: Hook, origin: str) -> None:
    """The format is changed and the address, which is not shown any more, stays."""
    assert json.loads(hook.got[-1].body)["link"] == f"{origin}/#/runs/fox-20261130-120000-abcd"
    page.get_by_label("Format of the webhook").select_option("discord")
    page.locator("[data-try=webhook]").click()
    until_so(page, lambda: len(hook.got) == 2)
    assert b"**fox has finished**" in hook.got[-1].body and b"PNG" in hook.got[-1].body


def test_a_damaged_file_is_named_and_replaced_by_what_is_filled_in(tmp_path: Path, browser: Browser):
    config = tmp_path / "config" / "shardstudio" / "notices.json"
    config.parent.mkdir(parents=True)
    config.write_text(f'{{"webhook": "{SECRET}"}}')
    with (
        serving(tmp_path / "runs", environment={"XDG_CONFIG_HOME": str(tmp_path / "config")}) as server,
        opened(browser, server.url) as page,
    ):
        visit(page, "machine")
        page.locator("#notices [role=alert]", has_text=f"{config}: damaged, or not of this version").wait_for()
        assert SECRET not in page.content()
        page.get_by_label("Mail to", exact=True).fill("ada@example.org")
        page.locator("#notices-save").click()
        said(page, "Saved.")
        assert json.loads(config.read_text())["mail"] == "ada@example.org"
