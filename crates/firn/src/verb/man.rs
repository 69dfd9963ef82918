//! `firn man`: the man pages, which are generated from the table of verbs and the table of options.

use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, FromArgMatches, ValueHint};

use crate::failure::{DONE, FAILED, Failure, USAGE};
use crate::output;
use crate::verb::Verb;

mod page;

pub const VERB: Verb = Verb {
    name: "man",
    about: "Print or write the man pages",
    long: "",
    examples: &[
        ("firn man | man -l -", "read firn(1)"),
        ("firn man wait | man -l -", "read firn-wait(1)"),
        (
            "firn man --dir /usr/local/share/man",
            "install all pages, in man1 and man8",
        ),
    ],
    exits: &[
        (0, "printed or written"),
        (1, "a page cannot be written"),
        (2, "no such verb"),
    ],
    args: ManArgs::augment_args,
    run,
};

#[derive(Debug, Args)]
struct ManArgs {
    /// Verb whose page is printed, or `mount.firn` [default: firn(1)].
    #[arg(conflicts_with = "dir")]
    verb: Option<String>,
    /// Write all pages to DIR/man1 and DIR/man8.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
}

/// Prints one man page, or writes all of them to a directory.
fn run(matches: &ArgMatches) -> Result<u8, Failure> {
    let args = ManArgs::from_arg_matches(matches)?;
    let pages = page::all_pages();
    if let Some(dir) = &args.dir {
        for page in &pages {
            write_page(dir, page)?;
        }
        return Ok(DONE);
    }
    let name = args.verb.as_deref().unwrap_or("firn");
    let is_named =
        |page: &&page::Page| page.name == name || page.name.strip_prefix("firn-") == Some(name);
    let Some(page) = pages.iter().find(is_named) else {
        return Err(Failure::new(
            USAGE,
            format!("there is no man page for {name}; `firn` lists the verbs"),
        ));
    };
    output::print(&page.roff)?;
    Ok(DONE)
}

/// Writes a page to the directory of its section below `dir`.
fn write_page(dir: &Path, page: &page::Page) -> Result<(), Failure> {
    let section = dir.join(format!("man{}", page.section));
    let path = section.join(format!("{}.{}", page.name, page.section));
    std::fs::create_dir_all(&section)
        .and_then(|()| std::fs::write(&path, &page.roff))
        .map_err(|error| Failure::new(FAILED, format!("cannot write {}: {error}", path.display())))
}
