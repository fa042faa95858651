function addCopies(root) {
  const { copy = "Copy", copied = "Copied", selected = "Selected" } = document.body.dataset;
  for (const box of root.querySelectorAll("pre.copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = copy;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(box.textContent);
        button.textContent = copied;
      } catch {
        getSelection().selectAllChildren(box);
        button.textContent = selected;
      }
    });
    box.before(button);
  }
}
