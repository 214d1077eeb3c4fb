// What is done with a run's result: a drawing with it, an upload to the hub. Each is a dialog.
'use strict';
{
  const { h, call } = studio;
  const AGAIN_MS = 1000;
  studio.results = {};

  /** A dialog with a title, its parts and a Close button. It removes itself when it is closed. */
  function dialog(id, title, ...parts) {
    const element = h(`dialog.dialog.roomy#${id}`, { 'aria-label': title, onclose: () => element.remove() }, h('h2', {}, title), ...parts);
    document.body.append(element);
    element.showModal();
    return element;
  }

  const closeButton = () => h('button.btn', { type: 'button', onclick: event => event.target.closest('dialog').close() }, 'Close');

  /** Ask again every second while a dialog is open, until the answer says that nothing runs. */
  async function follow(element, question, show) {
    while (element.isConnected) {
      const answer = await question();
      if (!element.isConnected) return;
      show(answer);
      if (!(answer.state || answer).is_running) return;
      await new Promise(resolve => setTimeout(resolve, AGAIN_MS));
    }
  }

  /** Run an action of a dialog and show what was refused at a place in it. */
  async function tried(place, action) {
    place.replaceChildren();
    try { await action(); } catch (error) {
      if (!(error instanceof studio.Refused)) throw error;
      place.replaceChildren(studio.alert(error.message));
    }
  }

  function drawing(found) {
    const side = (name, title) => h('figure', {}, found.is_text ? h('pre.code.written', { tabIndex: 0 }, found.texts[name])
      : found.images[name] ? h('img.image', { src: found.images[name], alt: `${title}: ${found.prompt}` }) : h('div.missing', {}, 'missing'), h('figcaption.sm', {}, title));
    return h('li', {}, h('p', {}, h('b', {}, found.prompt), h('span.dim.sm', {}, ` seed ${found.seed}, ${studio.duration(found.seconds)}, ${studio.when(found.time)}`)),
      h('div.pair', {}, side('base', 'without'), side('trained', 'with')));
  }

  studio.results.draw = async function (run, isText) {
    const prompt = h('textarea#draw-prompt', { rows: 2, 'aria-label': 'Prompt' }), seed = h('input#draw-seed', { type: 'text', inputMode: 'numeric', 'aria-label': 'Seed' });
    const place = h('div'), state = h('div#draw-state', { role: 'status' }), list = h('ul.drawings#drawings');
    const show = found => {
      state.replaceChildren(...(found.state.is_running ? [h('p.notice', {}, `${isText ? 'Writing' : 'Drawing'} twice, with and without. The model is loaded first.`)]
        : found.state.failed ? [studio.alert(found.state.text)] : []));
      button.disabled = found.state.is_running;
      studio.fill(list, found.drawings.map(one => one.time), () => found.drawings.map(drawing));
    };
    const watch = () => follow(element, () => call('result_drawings', { run }), show);
    const button = h('button.btn.main#draw', { type: 'button', onclick: () => tried(place, async () => {
      const number = seed.value.trim();
      if (number && !/^\d+$/.test(number)) throw new studio.Refused('Seed: write a whole number, or leave it empty for that of the samples.');
      await call('result_draw', { run, prompt: prompt.value, seed: number ? Number(number) : null });
      await watch();
    }) }, isText ? 'Write' : 'Draw');
    const about = h('p.sm'), note = ' It takes a free GPU, or a while on the CPU.';
    const element = dialog('draw-dialog', isText ? 'Write with it' : 'Draw with it', about,
      h('label.sm', { htmlFor: 'draw-prompt' }, 'Prompt'), prompt, h('label.sm', { htmlFor: 'draw-seed' }, 'Seed'), seed, place, state, h('div.row-end', {}, closeButton(), button), list);
    await tried(place, async () => {
      const found = await call('result_drawings', { run });
      prompt.value = found.prompts[0] || '';
      studio.say(about, found.is_text ? `One text that continues a prompt, from the same seed, with and without what was trained.${note}`
        : `One image from a prompt, from the same noise, with and without what was trained.${note}`);
      seed.placeholder = String(found.seed);
      show(found);
      if (found.state.is_running) await watch();
    });
  };

  studio.results.upload = async function (run) {
    const repo = h('input#upload-repo', { type: 'text', placeholder: 'your-name/model-name', spellcheck: false });
    const isPrivate = h('input#upload-private', { type: 'checkbox', checked: true }), overwrites = h('input#upload-overwrites', { type: 'checkbox' });
    const place = h('div'), question = h('div#upload-question'), state = h('div#upload-state', { role: 'status' });
    const values = () => ({ run, repo: repo.value.trim(), is_private: isPrivate.checked, overwrites: overwrites.checked });
    const show = found => state.replaceChildren(...(found.is_running ? [h('p.notice', {}, 'Uploading.')] : !found.text ? [] : found.failed ? [studio.alert(found.text)]
      : [h('p.notice.ok', {}, 'Uploaded: ', h('a', { href: found.text, target: '_blank', rel: 'noopener noreferrer' }, found.text))]));
    const watch = () => follow(element, () => call('result_upload_state', { run }), show);
    const agree = h('button.btn.main#upload-agree', { type: 'button', hidden: true, onclick: () => tried(place, async () => {
      agree.hidden = true;
      question.replaceChildren();
      await call('result_start_upload', values());
      await watch();
    }) }, 'Upload this');
    const look = h('button.btn#upload-look', { type: 'button', onclick: () => tried(place, async () => {
      const found = await call('result_upload_question', values());
      question.replaceChildren(h('pre.code', { tabIndex: 0 }, found.text), h('details', {}, h('summary', {}, 'Model card'), h('pre.code', { tabIndex: 0 }, found.card)));
      agree.hidden = false;
    }) }, 'Show what is uploaded');
    for (const input of [repo, isPrivate, overwrites]) input.addEventListener('input', () => { agree.hidden = true; question.replaceChildren(); });
    const element = dialog('upload-dialog', 'Upload to the Hugging Face hub', h('p.sm', {}, 'The exported files, a model card and the newest samples. Log in first: `hf auth login` in a terminal, with a token that may write.'),
      h('label.sm', { htmlFor: 'upload-repo' }, 'Repository'), repo, h('label.check-line', {}, isPrivate, ' private: only you see it'), h('label.check-line', {}, overwrites, ' replace files of an existing repository'),
      question, place, state, h('div.row-end', {}, closeButton(), look, agree));
    await tried(place, async () => { show(await call('result_upload_state', { run })); });
  };
}
