// The dialog that gives a run another name, on its own screen and in Runs.
// @ts-check
import * as studio from './core.js';

/**
 * Ask for the name of a run. Resolves to whether it was renamed.
 * @param {string} name Name of its folder.
 * @param {string} title The name that it has.
 */
export async function rename(name, title) {
  const asked = await studio.askText('Rename this run',
    { id: 'rename-to', value: title, maxLength: 200, 'aria-label': 'Name of the run' }, 'Rename',
    'Its folder and its exported files keep their names. Leave it empty for the name it had at first.');
  if (asked === null) return false;
  await studio.call('run_rename', { name, title: asked });
  return true;
}
