//! Two hosts and a client on one switch, all network namespaces of this machine.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use hotspare_kernel::netlink::{Netlink, VethPair};
use hotspare_net::probe::who_has;
use hotspare_net::takeover::{ServiceAddress, ServiceNetwork, TakeoverError, Uplink};
use nix::sched::{CloneFlags, setns, unshare};

/// Far beyond any delay of a busy machine, below the 8 s and more that a stale neighbour costs.
const PATIENCE: Duration = Duration::from_secs(6);

/// A network namespace that lives as long as this.
struct Room(File);

impl Room {
    fn new() -> Room {
        let made = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("tests of networks need root");
            File::open("/proc/thread-self/ns/net").unwrap()
        });
        let room = Room(made.join().unwrap());
        room.within(|| {
            let mut netlink = Netlink::open().unwrap();
            let loopback = netlink.link("lo").unwrap().index;
            netlink.set_up(loopback, true).unwrap();
        });
        room
    }

    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let visit = scope.spawn(|| {
                setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
                work()
            });
            visit.join().unwrap()
        })
    }
}

/// A switch; each host plugged in has its cable's end as `eth0`, or behind a bridge `br0`.
struct Lan {
    switch: Room,
    ports: AtomicU32,
}

impl Lan {
    fn new() -> Lan {
        let switch = Room::new();
        switch.within(|| {
            let mut netlink = Netlink::open().unwrap();
            netlink.add_bridge("br0").unwrap();
            let bridge = netlink.link("br0").unwrap().index;
            netlink.set_up(bridge, true).unwrap();
        });
        Lan { switch, ports: AtomicU32::new(1) }
    }

    fn host(&self, address: &str, bridged: bool) -> Room {
        let host = Room::new();
        let number = self.ports.fetch_add(1, Ordering::Relaxed);
        let port = format!("port{number}");
        self.switch.within(|| {
            let mut netlink = Netlink::open().unwrap();
            let mac = |side| [2, 0, 0, 0, side, number as u8];
            let far_namespace = host.0.as_fd();
            let (near, far) = (port.as_str(), "eth0");
            let pair = VethPair { near, near_mac: mac(1), far, far_mac: mac(2), far_namespace };
            netlink.add_veth(&pair).unwrap();
            let (end, bridge) =
                (netlink.link(&port).unwrap().index, netlink.link("br0").unwrap().index);
            netlink.set_master(end, Some(bridge)).unwrap();
            netlink.set_up(end, true).unwrap();
        });
        host.within(|| {
            let mut netlink = Netlink::open().unwrap();
            let mut own = netlink.link("eth0").unwrap().index;
            netlink.set_up(own, true).unwrap();
            if bridged {
                netlink.add_bridge("br0").unwrap();
                let bridge = netlink.link("br0").unwrap().index;
                netlink.set_master(own, Some(bridge)).unwrap();
                netlink.set_up(bridge, true).unwrap();
                own = bridge;
            }
            let address: ServiceAddress = address.parse().unwrap();
            netlink.add_address(own, address.address, address.prefix).unwrap();
        });
        host
    }
}

/// A guest's namespace with a server in it that greets with `name`.
fn serve(guest: &Room, address: IpAddr, name: u8) {
    let listener = guest.within(|| TcpListener::bind((address, 7000)).unwrap());
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.write_all(&[name]);
        }
    });
}

fn ask(client: &Room, address: IpAddr) -> u8 {
    client.within(|| {
        let to = SocketAddr::new(address, 7000);
        let mut stream = TcpStream::connect_timeout(&to, PATIENCE).expect("the address answers");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut name = [0];
        stream.read_exact(&mut name).expect("the server answers");
        name[0]
    })
}

fn the_address_moves(service: &str, hosts: [&str; 3], uplink: &Uplink) {
    let lan = Lan::new();
    let bridged = matches!(uplink, Uplink::Bridge { .. });
    let (one, two) = (lan.host(hosts[0], bridged), lan.host(hosts[1], bridged));
    let client = lan.host(hosts[2], false);
    let service: ServiceAddress = service.parse().unwrap();
    let guests = [Room::new(), Room::new()];
    let prepare = |host: &Room, guest: &Room| {
        let uplink = uplink.clone();
        host.within(|| ServiceNetwork::prepare(guest.0.as_fd(), service, uplink).unwrap())
    };
    let mut networks = [prepare(&one, &guests[0]), prepare(&two, &guests[1])];
    // Both can bind the address before either is connected.
    serve(&guests[0], service.address, 1);
    serve(&guests[1], service.address, 2);
    let mut spent = Vec::new();
    for round in 0..10 {
        let (here, there) = (round % 2, (round + 1) % 2);
        networks[there].withdraw().unwrap();
        spent.push(networks[here].announce().unwrap());
        assert_eq!(usize::from(ask(&client, service.address)), here + 1, "round {round}");
    }
    spent.sort();
    println!("{uplink:?}: announce min {:?} median {:?} max {:?}", spent[0], spent[5], spent[9]);
    let [first, second] = networks;
    drop((first, second));
    one.within(|| {
        let gone = Netlink::open().unwrap().link(&service.host_link());
        assert!(gone.is_err(), "the host's end outlived its owner");
    });
}

const V4: [&str; 3] = ["10.9.0.1/24", "10.9.0.2/24", "10.9.0.9/24"];
const V6: [&str; 3] = ["fd09::1/64", "fd09::2/64", "fd09::9/64"];

fn bridge() -> Uplink {
    Uplink::Bridge { name: "br0".into(), gateway: None }
}

fn routed() -> Uplink {
    Uplink::Routed { parent: "eth0".into() }
}

#[test]
fn an_ipv4_address_on_a_bridge_moves_and_clients_follow() {
    the_address_moves("10.9.0.50/24", V4, &bridge());
}

#[test]
fn an_ipv6_address_on_a_bridge_moves_and_clients_follow() {
    the_address_moves("fd09::50/64", V6, &bridge());
}

#[test]
fn a_routed_ipv4_address_moves_and_clients_follow() {
    the_address_moves("10.9.0.50/24", V4, &routed());
}

#[test]
fn a_routed_ipv6_address_moves_and_clients_follow() {
    the_address_moves("fd09::50/64", V6, &routed());
}

/// Only who answers now has an address; what the client has learned when the guest served it says
/// nothing.
fn who_asks_hears_of_a_guest_while_it_is_there(service: &str, hosts: [&str; 3], uplink: &Uplink) {
    let lan = Lan::new();
    let host = lan.host(hosts[0], matches!(uplink, Uplink::Bridge { .. }));
    let client = lan.host(hosts[2], false);
    let (service, guest): (ServiceAddress, _) = (service.parse().unwrap(), Room::new());
    let own = match hosts[2].parse::<ServiceAddress>().unwrap().address {
        IpAddr::V4(own) => Some(own),
        IpAddr::V6(_) => None,
    };
    let owner = |own, patience| {
        client.within(|| {
            let link = Netlink::open().unwrap().link("eth0").unwrap();
            who_has(link, own, service.address, patience).unwrap()
        })
    };
    let silence = Duration::from_millis(300);
    let mut network =
        host.within(|| ServiceNetwork::prepare(guest.0.as_fd(), service, uplink.clone()).unwrap());
    assert_eq!(owner(own, silence), None, "nobody has it yet");
    network.announce().unwrap();
    serve(&guest, service.address, 7);
    assert_eq!(ask(&client, service.address), 7);
    let found = owner(own, PATIENCE);
    assert!(found.is_some_and(|mac| mac != [0; 6]), "{found:?}");
    if matches!(uplink, Uplink::Bridge { .. }) {
        assert_eq!(owner(None, PATIENCE), found, "one who has no address yet is answered, too");
    }
    network.withdraw().unwrap();
    assert_eq!(owner(own, silence), None, "it is gone");
}

#[test]
fn who_has_an_ipv4_address_is_heard_of_while_it_is_there() {
    for uplink in [bridge(), routed()] {
        who_asks_hears_of_a_guest_while_it_is_there("10.9.0.50/24", V4, &uplink);
    }
}

#[test]
fn who_has_an_ipv6_address_is_heard_of_while_it_is_there() {
    for uplink in [bridge(), routed()] {
        who_asks_hears_of_a_guest_while_it_is_there("fd09::50/64", V6, &uplink);
    }
}

/// A connection to a guest that is withdrawn, announced again, and withdrawn for good.
fn a_withdrawn_guest_says_nothing(service: &str, hosts: [&str; 3], uplink: &Uplink) {
    let lan = Lan::new();
    let host = lan.host(hosts[0], matches!(uplink, Uplink::Bridge { .. }));
    let client = lan.host(hosts[2], false);
    let (service, guest): (ServiceAddress, _) = (service.parse().unwrap(), Room::new());
    let uplink = uplink.clone();
    let mut network =
        host.within(|| ServiceNetwork::prepare(guest.0.as_fd(), service, uplink).unwrap());
    network.announce().unwrap();
    let to = SocketAddr::new(service.address, 7000);
    let listener = guest.within(|| TcpListener::bind(to).unwrap());
    let mut asking = client.within(|| TcpStream::connect_timeout(&to, PATIENCE).unwrap());
    let (mut serving, _) = listener.accept().unwrap();

    network.withdraw().unwrap();
    serving.write_all(b"held").unwrap();
    let silence = |asking: &mut TcpStream| {
        asking.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let error = asking.read(&mut [0; 8]).expect_err("the guest is cut off");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    };
    silence(&mut asking);
    network.announce().unwrap();
    asking.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut said = [0; 4];
    asking.read_exact(&mut said).expect("it goes on when it is back");
    assert_eq!(&said, b"held");
    asking.write_all(b"unread, so that the end is a reset").unwrap();
    serving.set_read_timeout(Some(PATIENCE)).unwrap();
    serving.peek(&mut [0]).unwrap();

    network.withdraw().unwrap();
    drop(serving);
    silence(&mut asking);
}

#[test]
fn a_guest_cut_off_from_its_bridge_neither_ends_nor_resets() {
    a_withdrawn_guest_says_nothing("10.9.0.50/24", V4, &bridge());
    a_withdrawn_guest_says_nothing("fd09::50/64", V6, &bridge());
}

#[test]
fn a_guest_cut_off_from_its_route_neither_ends_nor_resets() {
    a_withdrawn_guest_says_nothing("10.9.0.50/24", V4, &routed());
    a_withdrawn_guest_says_nothing("fd09::50/64", V6, &routed());
}

#[test]
fn a_missing_bridge_is_named() {
    let (host, guest) = (Room::new(), Room::new());
    let service = "10.9.0.50/24".parse().unwrap();
    let error = host.within(|| ServiceNetwork::prepare(guest.0.as_fd(), service, bridge()));
    let error = error.unwrap_err();
    assert!(matches!(error, TakeoverError::HostLink { .. }), "{error}");
    assert!(error.to_string().contains("br0 does not exist"), "{error}");
}

#[test]
fn what_is_no_service_address_is_refused() {
    for text in ["10.0.0.1", "10.0.0.1/33", "10.0.0.1/0", "127.0.0.1/8", "::/64", "x/8", "1/2/3"] {
        assert!(text.parse::<ServiceAddress>().is_err(), "{text}");
    }
}
