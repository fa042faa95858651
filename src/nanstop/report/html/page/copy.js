function addCopies(root) {
  for (const box of root.querySelectorAll("pre.copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(box.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(box);
        button.textContent = "Selected";
      }
    });
    box.before(button);
  }
}
