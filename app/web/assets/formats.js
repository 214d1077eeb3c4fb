// Numbers, sizes, durations and dates as texts, and what the browser copies and remembers.
// @ts-check

/** @param {number | string} number */
export const count = number => Number(number).toLocaleString('en-US');
/**
 * @param {number} number
 * @param {string} one
 * @param {string} [many]
 */
export const counted = (number, one, many = one + 's') => `${count(number)} ${number === 1 ? one : many}`;
/** @param {number} value */
export const short = value => {
  const rounded = Number(value.toPrecision(4));
  if (rounded && (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e7)) return rounded.toExponential();
  return rounded.toLocaleString('en-US', { maximumFractionDigits: 6 });
};
/** @param {number} bytes */
export const gib = bytes => `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;
/** @param {number} bytes */
export const size = bytes => {
  for (const [unit, one] of /** @type {[string, number][]} */ ([['GB', 1e9], ['MB', 1e6], ['kB', 1e3]])) {
    if (bytes >= one) return `${(bytes / one).toFixed(bytes < 10 * one ? 1 : 0)} ${unit}`;
  }
  return `${bytes} B`;
};
/** @param {number} seconds */
export const duration = seconds => {
  if (!Number.isFinite(seconds)) return '–';
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s < 600 && s % 60 ? ` ${s % 60} s` : ''}`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
};
/** @param {number | null | undefined} unix */
export const when = unix => {
  if (!unix) return '–';
  const date = new Date(unix * 1e3), today = new Date(), time = date.toTimeString().slice(0, 5);
  if (date.toDateString() === today.toDateString()) return time;
  const day = `${date.getFullYear()}-${String(date.getMonth() + 1).padStart(2, '0')}-${String(date.getDate())
    .padStart(2, '0')}`;
  return `${day} ${time}`;
};
/**
 * Copy a text. Resolves to whether it was: without https browsers refuse, except on the same machine.
 * @param {string} text
 */
export const copy = async text => await navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false;
/**
 * A text as a sentence: with a capital letter and a full stop.
 * @param {string} text
 */
export const sentence = text => text && `${text[0].toUpperCase()}${text.slice(1)}.`;

/**
 * What the browser remembers; nothing where it may not.
 * @param {string} name
 * @param {string} [value] What it is to remember.
 */
export const kept = (name, value) => {
  try {
    if (value === undefined) return localStorage.getItem(`studio-${name}`);
    localStorage.setItem(`studio-${name}`, value);
  } catch { /* private windows of some browsers refuse */ }
  return null;
};
