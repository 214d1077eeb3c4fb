// Requests to the server, what it refuses, and whether it answers at all.
// @ts-check
import { h, fill, identity, alike, refocus, alert, note } from './elements.js';

/** What the server refused, as a sentence; `lost` when it did not answer at all. */
export class Refused extends Error {
  /**
   * @param {string} sentence
   * @param {boolean} [lost]
   */
  constructor(sentence, lost = false) { super(sentence); this.lost = lost; }
}

const MOST_SENT = 4e6; // bytes of a body that security.Guard lets in, less what is around it
const OTHER_VERSION = 'This page is of another version of ShardStudio than its server: reload it.';
const NO_ANSWER = 'The page’s server does not answer. Is ShardStudio still running in its terminal?';
/**
 * Call a function of the server.
 * @param {string} name
 * @param {Record<string, unknown>} [values] Its arguments.
 * @returns {Promise<import('./types.d.ts').Answer>}
 * @throws {Refused} At once while the server is known to hang: what is sent then would be done later, unasked.
 */
export async function call(name, values = {}) {
  if (JSON.stringify(values).length > MOST_SENT)
    throw new Refused('This is too long to be sent: shorten it to 4 million characters.');
  if (isHanging) throw new Refused(NO_ANSWER, true);
  const answer = await sent(name, values);
  if (!answer) {
    const reason = await closed();
    reached(false, reason || '');
    throw new Refused(reason || NO_ANSWER, true);
  }
  numAnswers++;
  isHanging = false;
  reached(true);
  if (answer.error !== undefined) throw new Refused(answer.error);
  return answer.value;
}

// A server that hangs closes no connection, and some answers take long: after a while the server is asked a question
// that it answers at once.
// No call is given up: when the server goes on, it answers what it was sent.
const SLOW_AFTER_MS = 4000, PROBED_FOR_MS = 8000, PROBED_AGAIN_MS = 2000;
const slow = new Set(); // calls that wait for so long
let isHanging = false, isProbing = false, numAnswers = 0;

/**
 * What the server answers to a call; undefined without an answer, and for a refusal by status.
 * @param {string} name
 * @param {Record<string, unknown>} values
 */
async function sent(name, values) {
  const own = {}, timer = setTimeout(() => { slow.add(own); probe(); }, SLOW_AFTER_MS);
  try {
    const headers = { 'content-type': 'application/json' };
    const answer = await fetch(`/calls/${name}`, { method: 'POST', headers, body: JSON.stringify(values) });
    if (answer.status === 404) return { error: OTHER_VERSION };
    return answer.ok ? await answer.json() : undefined;
  } catch { return undefined; } finally { clearTimeout(timer); slow.delete(own); }
}

/** Ask whether the server is there for as long as a call waits, and show what it says. */
async function probe() {
  if (isProbing) return;
  isProbing = true;
  while (slow.size) {
    const before = numAnswers, reason = await closed();
    if (slow.size && before === numAnswers) {
      isHanging = reason === null;
      reached(reason === '', reason || '');
    }
    await new Promise(resolve => setTimeout(resolve, PROBED_AGAIN_MS));
  }
  isProbing = isHanging = false;
}

/**
 * Ask for what a place shows. Undefined when it was refused, or when the place shows something else meanwhile
 * (`isStill()` is false).
 * @param {string} name
 * @param {Record<string, unknown>} values
 * @param {() => boolean} isStill
 * @param {(sentence: string) => void} complain Is given the sentence of a refusal, and "" when there was none.
 * @returns {Promise<import('./types.d.ts').Answer>}
 */
export async function fetched(name, values, isStill, complain) {
  let answer;
  try {
    answer = await call(name, values);
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (isStill() && !error.lost) complain(error.message);
    return undefined;
  }
  if (!isStill()) return undefined;
  complain('');
  return answer;
}

/**
 * Show or hide the bar that says that the server does not answer.
 * @param {boolean} is Whether it answers.
 * @param {string} [closed] Why it does not answer this browser.
 */
export function reached(is, closed = '') {
  const bar = document.querySelector('#lost');
  bar.hidden = is;
  if (is) return;
  const how = closed.startsWith('Log in')
    ? ['You are logged out. ', h('a', { href: '/', target: '_blank' }, 'Log in again'), ' in another tab.'] : closed;
  fill(bar, closed,
    () => (closed ? ['This page was closed. ', how, ' What you typed is kept here, and this tab goes on then.']
      : 'The page’s server does not answer. What you typed is kept here; running jobs go on. Trying again …'));
}

/**
 * Why the server lets this browser in no longer: after another token or password. "" where it does, null where it does
 * not answer.
 */
async function closed() {
  try {
    const answer = await fetch('/open', { cache: 'no-store', signal: AbortSignal.timeout(PROBED_FOR_MS) });
    return answer.status === 401 ? await answer.text() : '';
  } catch { return null; }
}

/**
 * Do something on a click and say at a place near it what came of it; the button waits meanwhile.
 * @param {HTMLButtonElement} button
 * @param {HTMLElement} place
 * @param {() => Promise<string | null | undefined | void>} action
 */
export async function act(button, place, action) {
  const hadFocus = document.activeElement === button, who = identity(button),
    at = alike(document.body, who).indexOf(button);
  button.disabled = true;
  try {
    const sentence = await action();
    place.replaceChildren(...(sentence ? [note(sentence)] : []));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    place.replaceChildren(alert(error.message));
  } finally {
    button.disabled = false;
    // a disabled one loses it, and it may have been drawn anew
    if (hadFocus) refocus(button, alike(document.body, who)[at]);
  }
}
