//! Every option once: flag, -o key, environment, TOML key, help, man page.
