//! A terminal of a size, with a program on it: what it shows, and keys.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::command::{wait_child, wait_until};

/// A program that runs on a terminal of its own. Dropped, it is killed.
pub struct OnTerminal {
    child: Child,
    keyboard: File,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl OnTerminal {
    /// Starts a program of the sandbox; the terminal is the one that controls its session.
    pub fn start(command: &Command, columns: u16, lines: u16) -> Self {
        let (master, slave) = open_terminal(columns, lines);
        let mut on_terminal = Command::new("setsid");
        on_terminal
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => on_terminal.env(name, value),
                None => on_terminal.env_remove(name),
            };
        }
        on_terminal.env("TERM", "xterm-256color");
        let end = |fd: &OwnedFd| Stdio::from(fd.try_clone().expect("dup"));
        on_terminal
            .stdin(end(&slave))
            .stdout(end(&slave))
            .stderr(end(&slave));
        let child = on_terminal.spawn().expect("start setsid");
        drop(on_terminal);
        drop(slave);
        let keyboard = File::from(master.try_clone().expect("dup"));
        let screen = Arc::new(Mutex::new(vt100::Parser::new(lines, columns, 0)));
        let shown = Arc::clone(&screen);
        let mut output = File::from(master);
        let reader = std::thread::spawn(move || {
            let mut buf = [0; 4096];
            // EIO: the last program has closed the terminal.
            while let Ok(count @ 1..) = output.read(&mut buf) {
                let mut parser = shown.lock().unwrap_or_else(PoisonError::into_inner);
                parser.process(&buf[..count]);
            }
        });
        Self {
            child,
            keyboard,
            screen,
            reader: Some(reader),
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Types keys.
    pub fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("type");
    }

    /// Gives the terminal another size.
    pub fn resize(&mut self, columns: u16, lines: u16) {
        let size = window_size(columns, lines);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.keyboard);
        // With the screen's lock: what the program draws for the new size must not reach a screen of the old one.
        self.with(|parser| {
            // SAFETY: the descriptor is open, and the kernel reads one winsize.
            let done = unsafe { libc::ioctl(fd, libc::TIOCSWINSZ, &raw const size) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            parser.screen_mut().set_size(lines, columns);
        });
    }

    /// The screen as text.
    pub fn text(&self) -> String {
        self.with(|parser| parser.screen().contents())
    }

    /// Looks at the screen, or changes it.
    pub fn with<T>(&self, look: impl FnOnce(&mut vt100::Parser) -> T) -> T {
        look(&mut self.screen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until the screen is as it should be.
    #[track_caller]
    pub fn wait_for(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until(what, Duration::from_secs(60), || {
                last = self.text();
                is_so(&last)
            });
        }));
        if let Err(panic) = waited {
            eprintln!("--- the screen while waiting for: {what}\n{}", self.text());
            std::panic::resume_unwind(panic);
        }
        self.text()
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait_for_end(&mut self) -> ExitStatus {
        let ended = wait_child(&mut self.child, Duration::from_secs(60));
        let ended = ended.expect("the program ends");
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader");
        }
        ended
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn window_size(columns: u16, lines: u16) -> libc::winsize {
    libc::winsize {
        ws_row: lines,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn open_terminal(columns: u16, lines: u16) -> (OwnedFd, OwnedFd) {
    let (mut master, mut slave) = (-1, -1);
    let mut size = window_size(columns, lines);
    // SAFETY: the pointers are those of two integers and a winsize, and no name and no settings are asked for.
    let done = unsafe {
        libc::openpty(
            &raw mut master,
            &raw mut slave,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut size,
        )
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: openpty(3) has opened them, and only this function has their numbers.
    let ends = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    for end in [&ends.0, &ends.1] {
        rustix::io::fcntl_setfd(end, rustix::io::FdFlags::CLOEXEC).expect("close on exec");
    }
    ends
}

/// A screen as a picture: an SVG of its text and colours.
pub fn svg_of(screen: &vt100::Screen) -> String {
    const CELL_WIDTH: f64 = 8.4;
    const LINE_HEIGHT: u32 = 18;
    const MARGIN: u32 = 10;
    let (lines, columns) = screen.size();
    let width = f64::from(columns) * CELL_WIDTH + 2.0 * f64::from(MARGIN);
    let height = u32::from(lines) * LINE_HEIGHT + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height}\" font-family=\"DejaVu Sans Mono, \
         Menlo, Consolas, monospace\" font-size=\"14\">\n<rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#1b1f24\"/>\n"
    );
    for line in 0..lines {
        let y = MARGIN + u32::from(line) * LINE_HEIGHT + 14;
        for run in runs(screen, line, columns) {
            let x = f64::from(MARGIN) + f64::from(run.column) * CELL_WIDTH;
            let length = run.text.chars().count() as f64 * CELL_WIDTH;
            let weight = if run.is_bold {
                " font-weight=\"bold\""
            } else {
                ""
            };
            let (fill, ground) = if run.is_inverse {
                ("#1b1f24", Some(run.colour))
            } else {
                (run.colour, None)
            };
            if let Some(ground) = ground {
                let top = y - 14;
                svg += &format!(
                    "<rect x=\"{x:.1}\" y=\"{top}\" width=\"{length:.1}\" height=\"{LINE_HEIGHT}\" fill=\"{ground}\"/>\n"
                );
            }
            let text = run
                .text
                .replace('&', "&amp;")
                .replace('<', "&lt;")
                .replace('>', "&gt;");
            svg += &format!(
                "<text x=\"{x:.1}\" y=\"{y}\" fill=\"{fill}\"{weight} textLength=\"{length:.1}\" xml:space=\"preserve\">{text}</text>\n"
            );
        }
    }
    svg + "</svg>\n"
}

/// Cells that follow each other and look alike.
struct Run {
    column: u16,
    text: String,
    colour: &'static str,
    is_bold: bool,
    is_inverse: bool,
}

fn runs(screen: &vt100::Screen, line: u16, columns: u16) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for column in 0..columns {
        let Some(cell) = screen.cell(line, column) else {
            continue;
        };
        let sign = if cell.has_contents() {
            cell.contents()
        } else {
            " "
        };
        let look = (colour_of(cell.fgcolor()), cell.bold(), cell.inverse());
        match runs.last_mut() {
            Some(run) if (run.colour, run.is_bold, run.is_inverse) == look => run.text += sign,
            _ => runs.push(Run {
                column,
                text: sign.to_owned(),
                colour: look.0,
                is_bold: look.1,
                is_inverse: look.2,
            }),
        }
    }
    runs.retain(|run| run.is_inverse || !run.text.trim().is_empty());
    runs
}

fn colour_of(colour: vt100::Color) -> &'static str {
    match colour {
        vt100::Color::Idx(1 | 9) => "#ff7b72",
        vt100::Color::Idx(2 | 10) => "#7ee787",
        vt100::Color::Idx(3 | 11) => "#e3b341",
        vt100::Color::Idx(4 | 12) => "#79c0ff",
        vt100::Color::Idx(6 | 14) => "#76e3ea",
        _ => "#e6edf3",
    }
}
