//! Helper program of the system tests: what has to run in a process of its own.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["writer", dir, log, seed] => {
            firn_tests::ack::write_until_error(Path::new(dir), Path::new(log), number(seed))
        }
        ["striped-writer", file, log, seed, which, writers] => {
            firn_tests::striped::write_until_error(
                Path::new(file),
                Path::new(log),
                number(seed),
                number(which),
                number(writers),
            );
        }
        ["verify", dir, log] => {
            firn_tests::ack::verify(Path::new(dir), Path::new(log));
        }
        ["append", file, id, count] => {
            firn_tests::ack::append_records(Path::new(file), number(id), number(count))
        }
        ["faultfs", source, mount_point, control, threads] => {
            firn_testfs::faults::serve(
                Path::new(source),
                Path::new(mount_point),
                Path::new(control),
                number(threads) as usize,
            )
            .expect("serve");
        }
        ["powerfs", mount_point] => {
            firn_testfs::power::serve(Path::new(mount_point)).expect("serve");
        }
        ["direct-writer", file, log] => {
            firn_tests::data_socket::write_until_killed(Path::new(file), Path::new(log))
        }
        ["direct-spoiler", file, how, seed] => {
            firn_tests::data_socket::spoil_on_command(Path::new(file), how, number(seed))
        }
        ["direct-version", file] => firn_tests::data_socket::print_version(Path::new(file)),
        ["replay", dir] => firn_tests::replay::serve(Path::new(dir)),
        ["hand", file] => firn_tests::hand::serve(Path::new(file)),
        ["change", uid, gid, group, may_set_id, call, path] => {
            let id = |text: &str| text.parse().expect("an id");
            firn_tests::change::serve(
                id(uid),
                id(gid),
                id(group),
                may_set_id == "1",
                call,
                Path::new(path),
            );
        }
        _ => {
            eprintln!(
                "usage: firn-test-helper writer DIR LOG SEED | striped-writer FILE LOG SEED WHICH WRITERS | verify DIR LOG | append FILE ID COUNT \
                 | faultfs SOURCE DIR CONTROL | powerfs DIR | hand FILE \
                 | change UID GID GROUP 0|1 CALL FILE \
                 | direct-writer FILE LOG | direct-spoiler FILE HOW SEED | direct-version FILE"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

fn number(text: &str) -> u64 {
    text.parse().expect("a whole number")
}
