// The dialog Mask of the screen Data: which part of an image counts in the loss, painted over the image. Nothing is
// written before Save, and what is not saved is there again when the dialog is opened the next time.
// @ts-check
import * as studio from './core.js';
import { call, h } from './core.js';
import { Dialog, hooks } from './mask-dialog.js';
import { levelsOf } from './mask-painting.js';

async function open(image, name, button) {
  button.disabled = true;
  try {
    const found = await call('mask_load', { image });
    new Dialog(image, name, found, await levelsOf(found.mask, found.width, found.height)).open();
  } catch (error) {
    if (!(error instanceof studio.Refused)) throw error;
    studio.toast(error.message, true);
  } finally { button.disabled = false; }
}

// --- cards ---------------------------------------------------------------------------------------------------------

/** {image: [stamp, address]} of what is drawn over a card. */
export const overlays = new Map();
let isShown = studio.kept('masks') === 'on';

async function cover(card) {
  const { image, mask } = card.data, place = card.frame.querySelector('.fr');
  let cover = place?.querySelector('.mk');
  if (!place || !mask || !isShown) { cover?.remove(); return; }
  if (!cover) place.append(cover = h('img.mk', { alt: '' }));
  if (overlays.get(image)?.[0] !== mask) {
    const src = await call('mask_overlay', { image }).catch(error => {
      if (!(error instanceof studio.Refused)) throw error;
      return '';
    });
    overlays.set(image, [mask, src]);
  }
  if (overlays.get(image)[1]) cover.src = overlays.get(image)[1]; else cover.remove();
}

const shown = new Set(); // cards that were drawn

export const mask = {
  /** Give what draws the screen again after a mask was saved. */
  connect(again) { hooks.refresh = again; },

  /** The button of a card. */
  button(card) {
    return h('button.mask-open',
      { type: 'button', hidden: true, onclick: event => open(card.data.image, card.data.name, event.currentTarget) },
      'Mask');
  },

  update(card) {
    const { name, mask, shape } = card.data;
    card.mask.hidden = mask === null || !shape;
    card.mask.setAttribute('aria-label', `Mask of ${name}`);
    card.mask.title = 'Paint the loss mask: the part of the image that counts';
    for (const one of shown) if (!one.element.isConnected && one !== card) shown.delete(one);
    shown.add(card);
    cover(card);
  },

  /** What shows and hides the masks of all cards. */
  toggle() {
    const box = h('input#data-masks', { type: 'checkbox', checked: isShown, onchange: () => {
      isShown = box.checked;
      studio.kept('masks', isShown ? 'on' : 'off');
      for (const card of shown) cover(card);
    } });
    return h('label.crop.sm', { title: 'Darken what masks leave out' }, box, 'Masks');
  },
};
