//! Builds one man page from one entry of a table.

use std::fmt::Write as _;
use std::io::Write as _;

use clap::{Arg, Command};
use clap_mangen::Man;
use firn_config::{VARIABLES, Variable};

use crate::verb::{self, GROUPS, Verb, mount_firn, verbs};

/// A finished man page.
pub struct Page {
    /// Name of the page without its section.
    pub name: String,
    /// Section of the page: 1 or 8.
    pub section: u8,
    /// The page in roff, for man(1).
    pub roff: String,
}

/// Returns all pages: firn(1), one for each verb, and mount.firn(8).
pub fn all_pages() -> Vec<Page> {
    let mut pages = vec![overview_page()];
    pages.extend(verbs().map(verb_page));
    pages.push(mount_firn_page());
    for page in &mut pages {
        page.roff = to_ascii(&page.roff);
    }
    pages
}

/// Returns firn(1), which lists all verbs (subcommands) and environment variables.
fn overview_page() -> Page {
    let mut roff = title_and_name(&with_source(Man::new(verb::command())));
    roff += ".SH SYNOPSIS\n\\fBfirn\\fR \\fIVERB\\fR [\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n";
    roff += &paragraphs(DESCRIPTION);
    for group in GROUPS {
        let _ = writeln!(roff, ".SS {}", escaped(group.title));
        for verb in group.verbs {
            let _ = write!(
                roff,
                ".TP\n\\fBfirn\\-{}\\fR(1)\n{}\n",
                escaped(verb.name),
                escaped(verb.about)
            );
        }
    }
    roff += &examples_section(EXAMPLES);
    roff += &terms_section("FILES", 'I', FILES.into_iter());
    roff += &terms_section("ENVIRONMENT", 'B', environment_variables());
    roff += &exit_status_section(EXITS);
    roff += ".SH SEE ALSO\n\\fBfirn\\-mount\\fR(1), \\fBfirn\\-run\\fR(1), \\fBmount.firn\\fR(8), \\fBmount\\fR(8), \\fBumount\\fR(8), \\fBfusermount3\\fR(1), \\fBfuse\\fR(4)\n";
    Page {
        name: "firn".into(),
        section: 1,
        roff,
    }
}

/// The description in firn(1): the first screen of the README, and the terms that all other pages use.
const DESCRIPTION: &[&str] = &[
    "Firn is a file system for checkpoints. Mount it in front of any directory. Unmodified programs write checkpoints to \
     memory of the host, and compute on at once. firnd, Firn's process for each mount, carries them to the directory as \
     ordinary files, in few large writes. Written data remains even if every process on the host is killed, including firnd.",
    "The directory in which files end up is the backing. The arena is memory in /dev/shm that holds data that is not in \
    the backing yet, 256 MiB unless the option arena-size says otherwise. It should hold a checkpoint of this host: when \
    it is full, writes wait for the drain, and nothing is lost. It belongs to no process. When firnd was killed, `firn \
    mount` of the same backing on the same host drains what the arena holds; `firn recover` does so without a mount. If \
    the host itself fails, data that is not durable may be lost.",
    "Written data is held (in memory: it survives the death of every process), then drained (in the backing, as after \
    write(2) and close(2) there: other hosts can read it), then durable (as after fsync(2): it survives the loss of the \
    host). `firn wait --until` waits for one of these levels, and `firn ls` shows the level of each file.",
    "Firn is not for data that must survive the loss of the host as soon as it is written. In front of a local disk, where \
    direct writes go to the page cache, it is no faster.",
];

const EXAMPLES: &[(&str, &str)] = &[
    (
        "firn mount /scratch/run42 /ckpt",
        "Mount: programs write to /ckpt, and the files end up in /scratch/run42. Needs no root.",
    ),
    (
        "firn status /ckpt",
        "What is in memory, what is written, and errors.",
    ),
    (
        "firn wait --until durable /ckpt/step_100",
        "Wait until this checkpoint would survive the loss of this host.",
    ),
    ("firn umount /ckpt", "Drain the rest, and unmount."),
    (
        "firn run --memory 8G --backing /scratch/run42 --prefix /tmp/ckpt -- mpirun -n 8 ./app /tmp/ckpt",
        "Mount, run one job that writes to /tmp/ckpt, drain and unmount. --memory is the arena-size of the mount.",
    ),
];

/// Returns the environment variables: one entry for those that set options, and all others.
fn environment_variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    let option_variables = (
        "FIRN_*",
        "The option of that name, in capitals with underscores: FIRN_ARENA_SIZE=1G is --arena-size 1G. `firn config` shows \
         each value and where it came from.",
    );
    let other_variables = VARIABLES
        .iter()
        .map(|Variable { name, meaning }| (*name, *meaning));
    std::iter::once(option_variables)
        .chain(other_variables)
        .chain([("NO_COLOR", "no colour, even on a terminal")])
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
    (
        3,
        "partly done; the remaining data is where it was, and the same command continues",
    ),
    (10, "not a firn arena or mount"),
    (11, "busy: another process or job uses it"),
    (
        12,
        "all connections to firnd are in use: repeat the command",
    ),
    (130, "interrupted"),
];

/// Returns the page of a verb (a subcommand of `firn`).
fn verb_page(verb: &Verb) -> Page {
    let name = format!("firn-{}", verb.name);
    let command = verb
        .command()
        .bin_name(format!("firn {}", verb.name))
        .display_name(name.clone());
    let mut roff = first_sections(Man::new(command.clone()), None);
    roff += &options_section(&command);
    roff += &examples_section(verb.examples);
    roff += &exit_status_section(verb.exits);
    roff += ".SH SEE ALSO\n\\fBfirn\\fR(1)\n";
    Page {
        name,
        section: 1,
        roff,
    }
}

/// Returns mount.firn(8), the page of the helper that mount(8) calls.
fn mount_firn_page() -> Page {
    let command = mount_firn::man_page_command();
    let mut roff = first_sections(
        Man::new(command.clone()).section("8"),
        Some(mount_firn::SYNOPSIS),
    );
    roff += &options_section(&command);
    roff += &examples_section(mount_firn::EXAMPLES);
    roff += &exit_status_section(mount_firn::EXITS);
    roff += ".SH SEE ALSO\n\\fBfirn\\-mount\\fR(1), \\fBfstab\\fR(5), \\fBmount\\fR(8)\n";
    Page {
        name: "mount.firn".into(),
        section: 8,
        roff,
    }
}

/// Returns the first sections: title, name, synopsis and description. The synopsis is clap's, unless one is given.
fn first_sections(man: Man, synopsis: Option<&str>) -> String {
    let man = with_source(man);
    let mut roff = title_and_name(&man).into_bytes();
    let synopsis_result = match synopsis {
        Some(command_line) => writeln!(roff, ".SH SYNOPSIS\n{}", escaped(command_line)),
        None => man.render_synopsis_section(&mut roff),
    };
    synopsis_result
        .and_then(|()| man.render_description_section(&mut roff))
        .expect("writing to memory does not fail");
    String::from_utf8(roff).expect("the tables are UTF-8")
}

/// Sets the source that the foot of the page names.
fn with_source(man: Man) -> Man {
    man.source(concat!("firn ", env!("CARGO_PKG_VERSION")))
}

/// Returns the title and the section NAME.
fn title_and_name(man: &Man) -> String {
    let mut roff = Vec::new();
    man.render_title(&mut roff)
        .and_then(|()| man.render_name_section(&mut roff))
        .expect("writing to memory does not fail");
    String::from_utf8(roff).expect("the tables are UTF-8")
}

/// Returns these texts as paragraphs.
fn paragraphs(paragraphs: &[&str]) -> String {
    paragraphs
        .iter()
        .map(|text| format!(".PP\n{}\n", escaped(text)))
        .collect()
}

/// Returns a section that lists names, set in font `font`, with their meanings.
fn terms_section<'a>(
    section: &str,
    font: char,
    rows: impl Iterator<Item = (&'a str, &'a str)>,
) -> String {
    let mut roff = format!(".SH {section}\n");
    for (name, meaning) in rows {
        let _ = write!(
            roff,
            ".TP\n\\f{font}{}\\fR\n{}\n",
            escaped(name),
            escaped(meaning)
        );
    }
    roff
}

/// Returns the section about the options of a command, as clap writes it. Returns an empty text if there are none.
fn options_section(command: &Command) -> String {
    let mut roff = Vec::new();
    if command.get_arguments().any(|arg: &Arg| !arg.is_hide_set()) {
        Man::new(command.clone())
            .render_options_section(&mut roff)
            .expect("writing to memory does not fail");
    }
    String::from_utf8(roff).expect("the tables are UTF-8")
}

/// Returns the section with the examples.
fn examples_section(examples: &[(&str, &str)]) -> String {
    let mut roff = String::from(".SH EXAMPLES\n");
    for (command_line, purpose) in examples {
        let _ = write!(
            roff,
            ".TP\n\\fB{}\\fR\n{}\n",
            escaped(command_line),
            escaped(purpose)
        );
    }
    roff
}

/// Returns the section about the exit statuses.
fn exit_status_section(exits: &[(u8, &str)]) -> String {
    let mut roff = String::from(".SH \"EXIT STATUS\"\n");
    for (status, meaning) in exits {
        let _ = write!(roff, ".TP\n{status}\n{}\n", escaped(meaning));
    }
    roff
}

/// Escapes text for roff: backslashes and hyphens stand for themselves, and no line begins with a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

/// Replaces characters that are not ASCII by their number, as roff requires (groff_char(7)).
fn to_ascii(roff: &str) -> String {
    let mut text = String::with_capacity(roff.len());
    for character in roff.chars() {
        if character.is_ascii() {
            text.push(character)
        } else {
            let _ = write!(text, "\\[u{:04X}]", u32::from(character));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verb_has_a_page_with_examples_and_exit_status() {
        let pages = all_pages();
        assert_eq!(pages.len(), verbs().count() + 2);
        for page in &pages {
            for section in [".SH NAME", ".SH SYNOPSIS", "EXIT STATUS"] {
                assert!(page.roff.contains(section), "{} lacks {section}", page.name);
            }
        }
        let firn = &pages[0].roff;
        for section in [
            "DESCRIPTION",
            "EXAMPLES",
            "FILES",
            "ENVIRONMENT",
            "\"EXIT STATUS\"",
            "SEE ALSO",
        ] {
            assert_eq!(
                firn.matches(&format!(".SH {section}\n")).count(),
                1,
                "{section}"
            );
        }
        assert!(firn.contains("FIRN_RUNTIME_DIR") && firn.contains("survives the death"));
        let mount = pages.iter().find(|page| page.name == "firn-mount").unwrap();
        assert!(mount.roff.contains("arena\\-size") && mount.roff.contains(".SH EXAMPLES"));
    }

    #[test]
    fn text_cannot_become_a_request() {
        assert_eq!(escaped(".TH a-b"), "\\&.TH a\\-b");
        assert_eq!(to_ascii("a…"), "a\\[u2026]");
    }
}
