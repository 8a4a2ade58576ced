//! What it costs to capture and restore a descriptor, by kind: `cargo run --release -p
//! hotspare-process --example descriptor_costs`. The guest is this program once more, with many
//! descriptors of one kind.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Instant;

use hotspare_image::memory::SharedId;
use hotspare_image::objects::Descriptor;
use hotspare_image::tree::{ClockReading, GuestPid};
use hotspare_kernel::{HostPid, descriptor, epoll, pidfd};
use hotspare_process::objects::capture::{Captured, DescriptorCapture};
use hotspare_process::objects::restore::{NoParts, RestoreContext, own_descriptors, restore_all};
use hotspare_process::objects::rules::FileRules;
use hotspare_process::objects::socket::SocketCapture;
use hotspare_process::objects::table::GuestProcess;

const COUNT: usize = 60;
const ROUNDS: usize = 101;
const KINDS: [&str; 11] = [
    "nothing",
    "regular",
    "directory",
    "pipe",
    "full pipe",
    "eventfd",
    "timerfd",
    "epoll",
    "null",
    "inotify",
    "unix pair",
];

type Failure = Box<dyn std::error::Error>;

fn open(kind: &str) -> Result<Vec<OwnedFd>, Failure> {
    let mut opened: Vec<OwnedFd> = Vec::new();
    while opened.len() < COUNT {
        match kind {
            "nothing" => break,
            "regular" => opened.push(File::open("/proc/self/exe")?.into()),
            "directory" => opened.push(File::open("/usr")?.into()),
            "pipe" | "full pipe" => {
                let (read, write) = descriptor::pipe(0)?;
                if kind == "full pipe" {
                    File::from(write.try_clone()?).write_all(&[7; 65536])?;
                }
                opened.extend([read, write]);
            }
            "eventfd" => opened.push(descriptor::eventfd(1, 0)?),
            "timerfd" => {
                let timer = descriptor::timerfd(libc::CLOCK_MONOTONIC, 0)?;
                descriptor::set_timerfd(timer.as_fd(), 0, 1_000_000_000_000, 0)?;
                opened.push(timer);
            }
            "epoll" => {
                let instance = epoll::create()?;
                if let Some(target) = opened.last() {
                    let (number, target) = (target.as_raw_fd(), target.as_fd());
                    let epoll = instance.as_fd();
                    let events = libc::EPOLLIN as u32;
                    // A chain of instances may not be deeper than five.
                    if !opened.len().is_multiple_of(3) {
                        let data = 1;
                        let watch = epoll::Registration { epoll, target, number, events, data };
                        epoll::register(&[watch])?;
                    }
                }
                opened.push(instance);
            }
            "null" => opened.push(File::open("/dev/null")?.into()),
            "inotify" => {
                let instance = descriptor::inotify(0)?;
                descriptor::add_watch(instance.as_fd(), c"/usr", libc::IN_CREATE)?;
                opened.push(instance);
            }
            "unix pair" => {
                let (left, right) = std::os::unix::net::UnixStream::pair()?;
                opened.extend([OwnedFd::from(left), OwnedFd::from(right)]);
            }
            other => return Err(format!("kind {other}").into()),
        }
    }
    Ok(opened)
}

/// The tenth part: what it costs when nothing else wants the processor.
fn undisturbed_us(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

/// Microseconds of the first capture, of a later one, of a restore.
fn measure(process: GuestProcess<'_>) -> Result<(f64, f64, f64), Failure> {
    let net = File::open("/proc/self/ns/net")?;
    let mut sockets = SocketCapture::open(net.as_fd())?;
    let rules = FileRules::default();
    let mut capturing = DescriptorCapture::new(rules.clone(), Vec::new());
    let mut name = |_: (u32, u32), inode| SharedId(inode);
    let (mut captures, mut restores) = (Vec::new(), Vec::new());
    let mut captured = Captured::default();
    let mut first = 0.0;
    for round in 0..ROUNDS {
        let start = Instant::now();
        captured = capturing.capture(&[process], &mut sockets, &mut name)?;
        let us = start.elapsed().as_secs_f64() * 1e6;
        match round {
            0 => first = us,
            _ => captures.push(us),
        }
    }
    let tables: Vec<(GuestPid, &[Descriptor])> = vec![(process.pid, &captured.tables[0])];
    for _ in 0..ROUNDS {
        let clocks = ClockReading::default();
        let context = RestoreContext::new(&NoParts, &rules, clocks, 0, own_descriptors()?);
        let start = Instant::now();
        let restored = restore_all(&captured.files, &tables, &context)?;
        restores.push(start.elapsed().as_secs_f64() * 1e6);
        drop(restored);
    }
    Ok((first, undisturbed_us(captures), undisturbed_us(restores)))
}

fn guest(kind: &str) -> Result<(f64, f64, f64), Failure> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg(kind)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
    output.read_line(&mut String::new())?;
    let host = HostPid(child.id() as i32);
    let file = pidfd::open(host)?;
    let measured = measure(GuestProcess { host, pid: GuestPid(2), pidfd: file.as_fd() });
    child.kill()?;
    child.wait()?;
    measured
}

fn main() -> Result<(), Failure> {
    if let Some(kind) = std::env::args().nth(1) {
        let opened = open(&kind)?;
        println!("{}", opened.len());
        std::io::stdin().lock().read_line(&mut String::new())?;
        return Ok(());
    }
    println!("| kind | first capture | capture | restore |   (µs for each of {COUNT})");
    println!("| --- | --- | --- | --- |");
    let (first, later, restore) = guest("nothing")?;
    println!("| three standard descriptors, in all | {first:.0} | {later:.0} | {restore:.0} |");
    for kind in &KINDS[1..] {
        let (kind_first, kind_later, kind_restore) = guest(kind)?;
        let each = |all: f64, base: f64| (all - base) / COUNT as f64;
        let first = each(kind_first, first);
        let later = each(kind_later, later);
        let restore = each(kind_restore, restore);
        println!("| {kind} | {first:.1} | {later:.1} | {restore:.1} |");
    }
    Ok(())
}
