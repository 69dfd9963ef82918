//! One man page from one entry of a table.

use std::fmt::Write as _;
use std::io::Write as _;

use clap::{Arg, Command};
use clap_mangen::Man;

use crate::verb::{self, VERBS, Verb, mount_firn};

/// A finished page.
pub struct Page {
    /// Without its section.
    pub name: String,
    /// 1 or 8.
    pub section: u8,
    /// The text for man(1).
    pub roff: String,
}

/// firn(1), a page for each verb, mount.firn(8).
pub fn all() -> Vec<Page> {
    let mut pages = vec![overview()];
    pages.extend(VERBS.iter().map(|verb| of_verb(verb)));
    pages.push(of_mount_firn());
    for page in &mut pages {
        page.roff = ascii(&page.roff);
    }
    pages
}

fn overview() -> Page {
    let mut roff = top(Man::new(verb::command()), None);
    roff += ".SH VERBS\n";
    for verb in VERBS {
        let _ = write!(
            roff,
            ".TP\n\\fBfirn\\-{}\\fR(1)\n{}\n",
            escaped(verb.name),
            escaped(verb.about)
        );
    }
    roff += ".SH FILES\n";
    for (path, what) in FILES {
        let _ = write!(roff, ".TP\n\\fI{}\\fR\n{}\n", escaped(path), escaped(what));
    }
    roff += &exit_status(EXITS);
    Page {
        name: "firn".into(),
        section: 1,
        roff,
    }
}

const FILES: [(&str, &str); 4] = [
    (
        "/dev/shm/firn-UID",
        "Arenas, sockets and logs of a user's mounts; FIRN_RUNTIME_DIR names another directory.",
    ),
    ("~/.config/firn/firn.toml", "A user's options."),
    ("/etc/firn/firn.toml", "The system's options."),
    (
        "/etc/fstab",
        "`BACKING DIR firn OPTIONS 0 0`: see mount.firn(8).",
    ),
];

const EXITS: &[(u8, &str)] = &[
    (0, "done"),
    (1, "failed"),
    (2, "an invalid option or argument"),
    (3, "partly done; what is left is safe"),
    (10, "not a firn arena or mount"),
    (11, "busy: held by somebody else"),
    (12, "try again: all connections to firnd are in use"),
    (130, "interrupted"),
];

fn of_verb(verb: &Verb) -> Page {
    let name = format!("firn-{}", verb.name);
    let command = verb
        .command()
        .bin_name(format!("firn {}", verb.name))
        .display_name(name.clone());
    let mut roff = top(Man::new(command.clone()), None);
    roff += &options(&command);
    roff += &examples(verb.examples);
    roff += &exit_status(verb.exits);
    roff += ".SH SEE ALSO\n\\fBfirn\\fR(1)\n";
    Page {
        name,
        section: 1,
        roff,
    }
}

fn of_mount_firn() -> Page {
    let command = mount_firn::page_command();
    let mut roff = top(
        Man::new(command.clone()).section("8"),
        Some(mount_firn::SYNOPSIS),
    );
    roff += &options(&command);
    roff += &examples(mount_firn::EXAMPLES);
    roff += &exit_status(mount_firn::EXITS);
    roff += ".SH SEE ALSO\n\\fBfirn\\-mount\\fR(1), \\fBfstab\\fR(5), \\fBmount\\fR(8)\n";
    Page {
        name: "mount.firn".into(),
        section: 8,
        roff,
    }
}

/// Title, name, synopsis (clap's, or a given one), description.
fn top(man: Man, synopsis: Option<&str>) -> String {
    let man = man.source(concat!("firn ", env!("CARGO_PKG_VERSION")));
    let mut roff = Vec::new();
    let rendered = man
        .render_title(&mut roff)
        .and_then(|()| man.render_name_section(&mut roff));
    let rendered = rendered.and_then(|()| match synopsis {
        Some(line) => writeln!(roff, ".SH SYNOPSIS\n{}", escaped(line)),
        None => man.render_synopsis_section(&mut roff),
    });
    rendered
        .and_then(|()| man.render_description_section(&mut roff))
        .expect("writing to memory does not fail");
    String::from_utf8(roff).expect("the tables are UTF-8")
}

fn options(command: &Command) -> String {
    let mut roff = Vec::new();
    if command.get_arguments().any(|arg: &Arg| !arg.is_hide_set()) {
        Man::new(command.clone())
            .render_options_section(&mut roff)
            .expect("writing to memory does not fail");
    }
    String::from_utf8(roff).expect("the tables are UTF-8")
}

fn examples(examples: &[(&str, &str)]) -> String {
    let mut roff = String::from(".SH EXAMPLES\n");
    for (line, what) in examples {
        let _ = write!(roff, ".TP\n\\fB{}\\fR\n{}\n", escaped(line), escaped(what));
    }
    roff
}

fn exit_status(exits: &[(u8, &str)]) -> String {
    let mut roff = String::from(".SH \"EXIT STATUS\"\n");
    for (code, what) in exits {
        let _ = write!(roff, ".TP\n{code}\n{}\n", escaped(what));
    }
    roff
}

/// Text for roff: backslashes and hyphens are themselves, and no line begins with a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

/// roff wants other characters by their number (groff_char(7)).
fn ascii(roff: &str) -> String {
    let mut text = String::with_capacity(roff.len());
    for c in roff.chars() {
        match c.is_ascii() {
            true => text.push(c),
            false => {
                let _ = write!(text, "\\[u{:04X}]", u32::from(c));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_a_page_with_examples_and_exit_status() {
        let pages = all();
        assert_eq!(pages.len(), VERBS.len() + 2);
        for page in &pages {
            for section in [".SH NAME", ".SH SYNOPSIS", "EXIT STATUS"] {
                assert!(page.roff.contains(section), "{} lacks {section}", page.name);
            }
        }
        let mount = pages.iter().find(|page| page.name == "firn-mount").unwrap();
        assert!(mount.roff.contains("arena\\-size") && mount.roff.contains(".SH EXAMPLES"));
    }

    #[test]
    fn text_cannot_become_a_request() {
        assert_eq!(escaped(".TH a-b"), "\\&.TH a\\-b");
        assert_eq!(ascii("a…"), "a\\[u2026]");
    }
}
