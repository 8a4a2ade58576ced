//! TCP sockets whose marks are the same are what they were: a look that remembers sees what a look
//! sees that asks about everything.

#[allow(dead_code, reason = "shared with other tests")]
mod common;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;

use common::{Capturing, Guest, Image, Opened};
use hotspare_image::objects::Object;
use hotspare_image::sockets::{TcpSocket, TcpState};
use hotspare_kernel::marks::Marks;
use hotspare_process::capture::prepare_marks;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

const CONNECTIONS: usize = 12;
const TURNS: u32 = 60;

/// Not a test of its own: the guest of the others.
#[test]
fn guest_side() {
    common::play(&[("connections", change_connections)]);
}

fn stream(fd: &OwnedFd) -> TcpStream {
    TcpStream::from(fd.try_clone().expect("duplicates"))
}

fn pair(listener: &TcpListener) -> [OwnedFd; 2] {
    let near = TcpStream::connect(listener.local_addr().expect("is bound")).expect("connects");
    let (far, _) = listener.accept().expect("accepts");
    near.set_nonblocking(true).expect("sets");
    far.set_nonblocking(true).expect("sets");
    [near.into(), far.into()]
}

/// A listener first, then both ends of each connection; each turn does something to a few.
fn change_connections(_: &Path, turn: u32, opened: &mut Opened) {
    if turn == 0 {
        let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let listener = TcpListener::bind(any).expect("binds");
        let pairs: Vec<_> = (0..CONNECTIONS).flat_map(|_| pair(&listener)).collect();
        opened.push(("listener", listener.into()));
        opened.extend(pairs.into_iter().map(|end| ("end", end)));
        return;
    }
    let mut dice = u64::from(turn) * 0x9e37_79b9_7f4a_7c15;
    let mut throw = |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (dice >> 33) as usize % below
    };
    let even = turn.is_multiple_of(2);
    for _ in 0..3 {
        let (near, far) = (1 + 2 * throw(CONNECTIONS), throw(2));
        let far = near + far;
        match throw(7) {
            0 | 1 => drop(stream(&opened[near].1).write(&[b'x'; 700][..1 + throw(600)])),
            2 => drop(stream(&opened[far].1).read(&mut [0; 300])),
            3 => drop(stream(&opened[far].1).shutdown(Shutdown::Write)),
            4 => {
                let listener = TcpListener::from(opened[0].1.try_clone().expect("duplicates"));
                let [one, other] = pair(&listener);
                (opened[near].1, opened[near + 1].1) = (one, other);
            }
            5 => {
                let flag = if even { FdFlag::empty() } else { FdFlag::FD_CLOEXEC };
                fcntl(&opened[far].1, FcntlArg::F_SETFD(flag)).expect("sets");
            }
            _ => {
                let flag = if even { OFlag::empty() } else { OFlag::O_APPEND };
                fcntl(&opened[far].1, FcntlArg::F_SETFL(flag | OFlag::O_NONBLOCK)).expect("sets");
            }
        }
    }
}

/// By number: flags and socket, without the clock of its timestamps and without options, which are
/// read in turns.
fn sockets(image: &Image) -> BTreeMap<i32, (bool, u32, TcpSocket)> {
    let each = image.tables[0].iter().filter_map(|descriptor| {
        let file = image.files.iter().find(|file| file.id == descriptor.file)?;
        let Object::Tcp(socket) = &file.object else { return None };
        let mut socket = socket.clone();
        socket.options.clear();
        if let TcpState::Connected(connection) = &mut socket.state {
            connection.timestamp = connection.timestamp.map(|clock| clock & 1);
        }
        Some((descriptor.fd, (descriptor.close_on_exec, file.flags, socket)))
    });
    each.collect()
}

#[test]
fn a_look_that_remembers_sees_what_one_sees_that_asks() {
    prepare_marks();
    assert!(Marks::loaded().is_some_and(|marks| marks.sockets.is_ok()), "no marks of sockets");
    let directory = tempfile::tempdir().expect("makes a directory");
    let mut guest = Guest::start("connections", directory.path());
    let mut kept = Capturing::of(&guest);
    let mut changed = 0;
    let mut last = BTreeMap::new();
    for turn in 0..TURNS {
        let ask = || sockets(&Capturing::of(&guest).capture(&[guest.process()]).expect("looks"));
        let (looks, asked) = loop {
            let before = ask();
            // The second look knows everything and asks nothing.
            let mut look = || sockets(&kept.capture(&[guest.process()]).expect("looks"));
            let looks = [look(), look()];
            // The kernel acknowledges on its own.
            if ask() == before {
                break (looks, before);
            }
        };
        assert!(asked.len() > CONNECTIONS, "{} sockets", asked.len());
        for (number, seen) in looks.iter().enumerate() {
            for (fd, socket) in &asked {
                assert_eq!(seen.get(fd), Some(socket), "turn {turn}, look {number}");
            }
            assert_eq!(seen.len(), asked.len(), "turn {turn}");
        }
        changed += u32::from(asked != last);
        last = asked;
        guest.turn();
    }
    assert!(changed > TURNS / 2, "the guest changed its sockets {changed} times");
    guest.end();
}
