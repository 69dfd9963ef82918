//! Test: each link between pages of the documentation leads to a file of the repository, and to a heading in it.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    /// Where pages are looked for.
    const PLACES: [&str; 8] = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs",
        "examples",
        "lab/README.md",
        "python/README.md",
        "scripts",
    ];

    /// The pages at or below a path, in order.
    fn pages_below(place: &Path) -> Vec<PathBuf> {
        if place.is_file() {
            let is_page = place.extension().is_some_and(|of| of == "md");
            return is_page.then(|| place.to_owned()).into_iter().collect();
        }
        let entries = fs::read_dir(place).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths.iter().flat_map(|path| pages_below(path)).collect()
    }

    /// The lines of a page outside of its blocks of code.
    fn prose(page: &str) -> impl Iterator<Item = (usize, &str)> {
        let mut is_block = false;
        page.lines().enumerate().filter(move |(_, line)| {
            let is_fence = line.trim_start().starts_with("```");
            is_block ^= is_fence;
            !is_block && !is_fence
        })
    }

    /// The anchor that a heading has on GitHub.
    fn anchor(heading: &str) -> String {
        let lower = heading.trim().to_lowercase();
        let kept = lower
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    }

    fn has_anchor(page: &str, wanted: &str) -> bool {
        prose(page)
            .filter_map(|(_, line)| line.strip_prefix('#'))
            .any(|rest| anchor(rest.trim_start_matches('#')) == wanted)
    }

    /// Targets of the links in a line.
    fn targets(line: &str) -> impl Iterator<Item = &str> {
        line.split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
            .filter(|target| !target.contains("://") && !target.contains(' '))
    }

    /// Why a link of `page` leads nowhere, if it does.
    fn fault(page: &Path, text: &str, target: &str) -> Option<String> {
        let (file, wanted) = target.split_once('#').unwrap_or((target, ""));
        let path = page.parent()?.join(file);
        let linked = if file.is_empty() {
            text.to_owned()
        } else if path.is_dir() && wanted.is_empty() {
            return None;
        } else {
            match fs::read(&path) {
                Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
                Err(_) => return Some(format!("{target}: there is no such file")),
            }
        };
        let is_found = wanted.is_empty() || has_anchor(&linked, wanted);
        (!is_found).then(|| format!("{target}: that page has no such heading"))
    }

    fn faults(page: &Path) -> Vec<String> {
        let text = fs::read_to_string(page).expect("a page");
        let links =
            prose(&text).flat_map(|(index, line)| targets(line).map(move |link| (index, link)));
        let found = links.filter_map(|(index, target)| {
            let fault = fault(page, &text, target)?;
            Some(format!("{}:{}: {fault}", page.display(), index + 1))
        });
        found.collect()
    }

    #[test]
    fn each_link_of_a_page_leads_somewhere() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let pages: Vec<_> = PLACES
            .iter()
            .flat_map(|place| pages_below(&root.join(place)))
            .collect();
        assert!(pages.len() > 20, "pages are not found: {pages:?}");
        let faults: Vec<_> = pages.iter().flat_map(|page| faults(page)).collect();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn a_link_that_leads_nowhere_is_named() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (one, two) = (dir.path().join("one.md"), dir.path().join("two.md"));
        fs::write(
            &one,
            "[a](two.md#a-b) [b](two.md#c) [c](three.md) [d](#x) [e](https://x)\n```\n[f](four.md)\n```\n# X\n",
        )
        .expect("write");
        fs::write(&two, "## A `b`\n").expect("write");
        let name = one.display();
        assert_eq!(
            faults(&one),
            [
                format!("{name}:1: two.md#c: that page has no such heading"),
                format!("{name}:1: three.md: there is no such file"),
            ]
        );
    }
}
