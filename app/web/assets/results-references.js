// The reference images of a drawing: those of the run's samples or of a pair held out, and files given to the page.
// @ts-check
import * as studio from './core.js';
import { h, call } from './core.js';

const MOST_BYTES = 2_900_000, MOST_SIDE = 2048;

/**
 * A field to choose the references in, hidden until `offer` says that the model reads some.
 * write: Is given the caption of a pair that was chosen.
 */
export function chooser(run, write) {
  const boxes = h('div.references'), place = h('div');
  const file = h('input#draw-reference', { type: 'file', accept: 'image/*', multiple: true, onchange: async () => {
    const files = [...file.files || []];
    place.replaceChildren();
    file.disabled = true;
    try {
      for (const one of files) boxes.append(box({ ...await sent(one), is_chosen: true }));
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      place.replaceChildren(studio.alert(error.message));
    } finally {
      file.disabled = false;
      file.value = '';
    }
  } });
  const take = pair => {
    for (const one of /** @type {NodeListOf<HTMLInputElement>} */ (boxes.querySelectorAll('input'))) {
      one.checked = false;
      if (pair.references.some(own => own.name === one.value)) one.closest('label')?.remove();
    }
    boxes.append(...pair.references.map(one => box({ ...one, is_chosen: true })));
    write(pair.caption);
  };
  const pairs = h('div.held-out');
  const heldOut = h('details#draw-held-out', { hidden: true, ontoggle: async () => {
    if (!heldOut.open || pairs.childElementCount) return;
    try {
      const found = await call('result_held_out', { run });
      pairs.replaceChildren(...found.length ? found.map(pair => h('button.btn.s',
        { type: 'button', title: pair.caption, onclick: () => take(pair) },
        pair.references.map(one => h('img', { src: one.image, alt: 'reference' })), h('span', {}, pair.caption)))
        : [studio.note('No pair that is held out was found.')]);
    } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      heldOut.open = false;
      place.replaceChildren(studio.alert(error.message));
    }
  } }, h('summary.sm', {}, 'Take a pair that is held out'), pairs);
  const element = h('fieldset#draw-references', { hidden: true }, h('legend.sm', {}, 'References'),
    h('p.sm.dim', {}, 'Images that the model is shown with every prompt, in this order.'), boxes, heldOut,
    h('label.sm', { htmlFor: 'draw-reference' }, 'Add images'), file, place);
  const chosen = () => [...boxes.querySelectorAll('input:checked')].map(one => /** @type {any} */ (one).value);
  return {
    element,
    offer: found => {
      element.hidden = !found.reads_references;
      heldOut.hidden = !found.has_held_out;
      boxes.append(...found.references.map(box));
    },
    /** What `result_draw` is given in addition. */
    values: () => (element.hidden ? {} : { references: chosen() }),
  };
}

const box = one => h('label', {}, h('img.image', { src: one.image, alt: '' }),
  h('span.check-line', {}, h('input', { type: 'checkbox', value: one.name, checked: one.is_chosen }), ' reference'));

/** Send an image, scaled down where it is larger than what a drawing uses. */
async function sent(file) {
  let content = /** @type {Blob} */ (file);
  if (file.size > MOST_BYTES) {
    const image = await createImageBitmap(file)
      .catch(() => { throw new studio.Refused(`reference: ${file.name} is not an image that this browser reads`); });
    const scale = Math.min(1, MOST_SIDE / Math.max(image.width, image.height)), canvas = h('canvas', {});
    [canvas.width, canvas.height] = [image.width, image.height].map(side => Math.max(1, Math.round(side * scale)));
    /** @type {any} */ (canvas.getContext('2d')).drawImage(image, 0, 0, canvas.width, canvas.height);
    content = await new Promise(done => canvas.toBlob(blob => done(blob || file), 'image/webp', .95));
  }
  const url = await new Promise(done => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.readAsDataURL(content);
  });
  return call('result_add_reference', { content: url.slice(url.indexOf(',') + 1) });
}
