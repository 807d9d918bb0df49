// Snippets of search results are of a page's text: the theme's buttons, which its main part also has, are left out.
// An entry of the index has an empty anchor: its snippet is of the page.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const textOf = Search.htmlToText;
  Search.htmlToText = (page, anchor) => {
    const article = new DOMParser().parseFromString(page, "text/html").querySelector("article");
    const part = anchor?.startsWith("#index-") ? undefined : anchor;
    return textOf(article ? `<div role="main">${article.innerHTML}</div>` : page, part).trim();
  };
});
