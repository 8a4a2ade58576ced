//! Records what two agents say to each other: `record_stream HOTSPARE DIRECTORY/NAME` runs a small
//! guest with one spare, both of this program, and leaves `NAME-primary.bin` and `NAME-spare.bin`.
//!
//! The recordings in `crates/replica/tests/recorded` are made so by the release that spoke that
//! version last, and never again.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use hotspare_torture::Lab;
use hotspare_torture::lab::LAB_DIR;
use hotspare_torture::protected::{HANG, STREAM_PORT, wait_for_listener};

/// Writes a file, waits for some checkpoints, ends.
const GUEST: &str = "echo first > data/file; sleep 0.3; echo second >> data/file; sleep 0.3; true";

/// Passes bytes on until there are no more; all of them.
fn pass(mut from: TcpStream, mut to: TcpStream) -> Vec<u8> {
    let (mut all, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    while let Ok(length @ 1..) = from.read(&mut piece) {
        all.extend_from_slice(&piece[..length]);
        if to.write_all(&piece[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    all
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [program, name] = &arguments[..] else { anyhow::bail!("record_stream HOTSPARE NAME") };
    let lab = Lab::new(2)?;
    let (alpha, beta) = (lab.host(0), lab.host(1));
    std::fs::create_dir_all(alpha.outside(format!("{LAB_DIR}/data")))?;
    let behind = beta.socket(STREAM_PORT + 1);
    let mut spare = Command::new(program);
    spare.args(["spare", "--insecure", "--listen", &behind.to_string()]);
    let spare = beta.spawn(&mut spare)?;
    wait_for_listener(&spare, behind.port(), HANG)?;
    let at = beta.socket(STREAM_PORT);
    let listener = beta.inside(move || TcpListener::bind(at))?;
    let tap = beta.thread(move || -> Result<(Vec<u8>, Vec<u8>)> {
        let (primary, _) = listener.accept()?;
        let spare = TcpStream::connect(behind)?;
        let (back, forth) = (spare.try_clone()?, primary.try_clone()?);
        let answers = std::thread::spawn(move || pass(back, forth));
        let said = pass(primary, spare);
        Ok((said, answers.join().ok().context("the tap broke")?))
    });
    let mut primary = Command::new(program);
    // The guest's memory is about to be published.
    primary.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    primary.args(["run", "--insecure", "--epoch", "100ms", "--directory", LAB_DIR]);
    primary.args(["--files", &format!("replicate:{LAB_DIR}/data"), "--guest", "recorded"]);
    primary.args(["--spare", &at.to_string(), "--", "sh", "-c", GUEST]);
    let primary = alpha.spawn(&mut primary)?;
    let status = primary.wait(Duration::from_secs(60))?;
    let (said, answered) = tap.join().ok().context("the tap broke")??;
    println!("{status}, {} bytes, {} answered\n{}", said.len(), answered.len(), primary.said());
    std::fs::write(format!("{name}-primary.bin"), said)?;
    std::fs::write(format!("{name}-spare.bin"), answered)?;
    Ok(())
}
