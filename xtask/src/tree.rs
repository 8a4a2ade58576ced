//! The source tree: where it is and which files are in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The root of the source tree.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root")
}

/// Every file that git tracks or would.
pub fn files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("run git ls-files")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("file names are UTF-8")?;
    let files = names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from);
    Ok(files.filter(|file| file.is_file()).collect())
}

/// Where everything is built.
pub fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Builds the `hotspare` program and tells where it is. `$HOTSPARE_BIN` names one to take instead.
pub fn build_hotspare() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("HOTSPARE_BIN") {
        return Ok(binary.into());
    }
    let mut build = cargo(&["build", "--quiet", "--release", "--bin", "hotspare"]);
    ensure!(build.status().context("run cargo")?.success(), "hotspare does not build");
    Ok(target().join("release/hotspare"))
}

/// Builds the program with the gate broken, and tells where it is. What it has in common with the
/// one that is not is built once, where cargo knows how (1.91 and later).
pub fn build_hotspare_broken() -> Result<PathBuf> {
    let dir = target().join("broken-gate");
    let mut build = cargo(&["build", "--quiet", "--release", "--bin", "hotspare"]);
    build.args(["--features", "hotspare-node/broken-gate", "--target-dir"]).arg(&dir);
    build.arg("--config").arg(format!("build.build-dir={:?}", target().display().to_string()));
    ensure!(build.status().context("run cargo")?.success(), "the broken hotspare does not build");
    Ok(dir.join("release/hotspare"))
}

/// The cargo that runs us, as if called by hand. What `cargo run` tells the program about itself
/// (`CARGO_MANIFEST_DIR`, `CARGO_PKG_…`) is left out: `ring` is built anew whenever that differs,
/// and with it nearly everything here.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let told = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        });
        if told {
            cargo.env_remove(name);
        }
    }
    cargo.args(arguments);
    cargo
}
