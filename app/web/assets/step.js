// The memory over one training step: a picture that Python drew, with a sentence below it.
'use strict';
{
  const { h } = studio;

  /** Show what form_answers.step sends. */
  studio.stepPicture = function ({ picture, sentence }) {
    const drawn = new DOMParser().parseFromString(picture, 'image/svg+xml').documentElement;
    return h('figure.step-picture', {}, document.importNode(drawn, true), h('figcaption', {}, sentence));
  };
}
