//! Test: each message that docs/TROUBLESHOOTING.md explains is in the source of a program of Firn.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    const PAGE: &str = "docs/TROUBLESHOOTING.md";
    /// Header of the tables whose first column has messages.
    const HEADER: &str = "| message |";

    /// Pieces of the messages in the first column: a message is code, and `…` stands for what differs.
    fn pieces(page: &str) -> Vec<String> {
        let mut pieces = Vec::new();
        let mut is_table = false;
        for line in page.lines() {
            is_table = line.starts_with(HEADER) || is_table && line.starts_with('|');
            let first = line.trim_matches('|').split('|').next();
            let Some(cell) = first.filter(|_| is_table) else {
                continue;
            };
            for code in cell.split('`').skip(1).step_by(2) {
                let parts = code.split('…').map(str::trim);
                pieces.extend(parts.filter(|part| part.contains(' ')).map(str::to_owned));
            }
        }
        pieces
    }

    /// All sources below a directory in one text, strings over several lines as one.
    fn sources(dir: &Path) -> String {
        let mut text = String::new();
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if path.is_dir() {
                text += &sources(&path);
            } else if path.extension().is_some_and(|of| of == "rs") {
                let source = fs::read_to_string(&path).unwrap_or_default();
                let mut lines = source.lines().map(str::trim_start);
                for line in &mut lines {
                    match line.strip_suffix('\\') {
                        Some(begin) => text += begin,
                        None => text = text + line + "\n",
                    }
                }
            }
        }
        text
    }

    #[test]
    fn each_message_of_the_page_is_one_of_the_code() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let page = fs::read_to_string(root.join(PAGE)).expect(PAGE);
        let pieces = pieces(&page);
        assert!(pieces.len() > 20, "the page is not understood: {pieces:?}");
        let code = sources(&root.join("crates"));
        let missing: Vec<_> = pieces
            .iter()
            .filter(|piece| !code.contains(*piece))
            .collect();
        assert!(
            missing.is_empty(),
            "{PAGE} has messages of no program: {missing:#?}"
        );
    }

    #[test]
    fn messages_are_taken_apart_where_they_differ() {
        let page = "| message | means |\n|---|---|\n| `lane … is gone`, `a b … c d` (3) | `no x` |\n\n| x |\n|---|\n| `e f` |\n";
        assert_eq!(pieces(page), ["is gone", "a b", "c d"]);
    }
}
