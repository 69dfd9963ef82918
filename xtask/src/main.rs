//! Development tasks: `cargo run -p xtask -- TASK`.

mod campaign;
mod pages;
mod semantics;

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("campaign") => campaign::run(&std::env::args().skip(2).collect::<Vec<_>>()),
        Some("pages") => pages::run(),
        Some("semantics") => semantics::run(),
        _ => anyhow::bail!("usage: cargo run -p xtask -- campaign|pages|semantics"),
    }
}
