//! The control interface, by clients of its description: who is answered, and what.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotspare_replica::Identity;
use hotspare_replica::keys::NODE_NAME;
use hotspare_torture::Lab;
use hotspare_torture::lab::{Host, Process};
use hotspare_torture::protected::{Engine, HANG, STREAM_PORT, wait_for_listener};
use hyper_util::rt::TokioIo;
use proto::control_client::ControlClient;
use proto::{
    Event, EventsRequest, HistoryRequest, PauseProtectionRequest, ResumeProtectionRequest, Role,
    StatusRequest, SwitchoverRequest, event,
};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

mod proto {
    tonic::include_proto!("hotspare.v1");
}

const BINARY: &str = env!("CARGO_BIN_EXE_hotspare");
/// Of a busy machine.
const PATIENT: [&str; 2] = ["--silence", "500ms"];
const PORT: u16 = 7071;
const KEYS: &str = "/srv/hotspare-lab/keys";

fn engine() -> Engine {
    Engine {
        binary: BINARY.into(),
        epoch: Duration::from_millis(50),
        service_cidr: None,
        replicated: vec![],
        more: ["--guest", "sleeper"].iter().chain(&PATIENT).map(|word| (*word).into()).collect(),
    }
}

/// Does something asynchronous on a host.
fn on<T: Send + 'static>(host: &Host, work: impl AsyncFnOnce() -> T + Send + 'static) -> T {
    host.inside(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(HANG, work()).await.expect("no hang") })
    })
}

async fn by_socket(pid: i32) -> ControlClient<Channel> {
    let path = PathBuf::from(format!("/run/hotspare/{pid}.sock"));
    let dial = move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    };
    let endpoint = Endpoint::from_static("http://agent");
    let channel = endpoint.connect_with_connector(tower::service_fn(dial)).await;
    ControlClient::new(channel.expect("the agent listens"))
}

/// The status over the network, with these settings of TLS or in plain text.
async fn status_by_tcp(to: SocketAddr, tls: Option<ClientConfig>) -> Result<u32, String> {
    let endpoint = Endpoint::from_static("http://agent");
    let channel = match tls {
        None => {
            let dial = move |_| async move { TcpStream::connect(to).await.map(TokioIo::new) };
            endpoint.connect_with_connector(tower::service_fn(dial)).await
        }
        Some(config) => {
            let connector = TlsConnector::from(Arc::new(config));
            let dial = move |_| {
                let connector = connector.clone();
                async move {
                    let stream = TcpStream::connect(to).await?;
                    let name = ServerName::try_from(NODE_NAME).unwrap();
                    connector.connect(name, stream).await.map(TokioIo::new)
                }
            };
            endpoint.connect_with_connector(tower::service_fn(dial)).await
        }
    };
    let mut client = ControlClient::new(channel.map_err(|error| error.to_string())?);
    let answer = client.status(StatusRequest {}).await;
    answer.map(|answer| answer.into_inner().pid).map_err(|status| status.to_string())
}

fn protected(lab: &Lab) -> (Process, Process) {
    let engine = engine();
    let spare = engine.spare_with(lab.host(1), &PATIENT).unwrap();
    let guest = ["sleep", "1000"].map(str::to_owned);
    let primary = engine.run(lab.host(0), &[lab.host(1)], &guest).unwrap();
    Engine::protected(&primary).unwrap();
    (primary, spare)
}

/// Reads events until a record of this kind; how many of the other kinds came before it.
async fn until(events: &mut tonic::Streaming<Event>, wanted: &str) -> usize {
    let mut others = 0;
    loop {
        let event = events.message().await.unwrap().expect("the agent lives");
        match event.what {
            Some(event::What::Record(record)) if record.event == wanted => return others,
            _ => others += 1,
        }
    }
}

#[test]
fn an_operator_sees_and_steers_by_the_socket() {
    let lab = Lab::new(2).unwrap();
    let (primary, _spare) = protected(&lab);
    let pid = primary.pid();
    on(lab.host(0), async move || {
        let mut client = by_socket(pid).await;
        let mut events = client.events(EventsRequest { epochs: false }).await.unwrap().into_inner();
        let mut epochs = client.events(EventsRequest { epochs: true }).await.unwrap().into_inner();
        let status = client.status(StatusRequest {}).await.unwrap().into_inner();
        assert_eq!((status.role(), &*status.guest), (Role::Primary, "sleeper"));
        assert_eq!((status.term, status.ready, status.paused), (1, 1, false));
        loop {
            let event = epochs.message().await.unwrap().unwrap();
            if let Some(event::What::Epoch(epoch)) = event.what {
                assert!(epoch.pause_us > 0.0 && epoch.epoch > 0, "{epoch:?}");
                break;
            }
        }

        // Twice is as good as once.
        for _ in 0..2 {
            let request = PauseProtectionRequest { reason: "a test".into() };
            client.pause_protection(request).await.unwrap();
        }
        until(&mut events, "paused").await;
        let status = client.status(StatusRequest {}).await.unwrap().into_inner();
        assert!(status.paused);
        until(&mut events, "unprotected").await;
        let refused = client.switchover(SwitchoverRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("hotspare resume"), "{refused}");
        client.resume_protection(ResumeProtectionRequest {}).await.unwrap();
        until(&mut events, "protected").await;

        let mut moved = client.switchover(SwitchoverRequest::default()).await.unwrap().into_inner();
        let moved = moved.message().await.unwrap().expect("a word before the end");
        assert!(moved.stall_ms > 0.0 && moved.epoch > 0, "{moved:?}");
    });
    assert_eq!(primary.wait(HANG).unwrap().code(), Some(0));
}

/// The guest runs on alone, and a death then is the end: no spare takes over.
#[test]
fn a_guest_whose_protection_is_paused_is_taken_over_by_nobody_until_it_is_resumed() {
    let lab = Lab::new(2).unwrap();
    let (primary, spare) = protected(&lab);
    let hotspare = |words: &[&str]| {
        let told = lab.host(0).run(Command::new(BINARY).args(words), HANG);
        told.unwrap_or_else(|error| panic!("{error}\n{}", primary.said()))
    };
    assert!(hotspare(&["pause", "--reason", "a test"]).contains("UNPROTECTED"));
    assert!(hotspare(&["status"]).contains("PAUSED"));
    let status =
        || -> serde_json::Value { serde_json::from_str(&hotspare(&["status", "--json"])).unwrap() };
    let await_status = |name: &str, wanted: u64| {
        let deadline = Instant::now() + HANG;
        while status()[name] != wanted {
            let said = || format!("{}\n{}", primary.said(), spare.said());
            assert!(Instant::now() < deadline, "{name} {wanted}: {}", said());
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    // The spare is back, and waits.
    await_status("spares", 1);
    await_status("ready", 0);
    let epoch = status()["epoch"].clone();
    let ghost = |host: &Host| Engine::status(host, Path::new(BINARY), "epoch");
    let paused_at = ghost(lab.host(1));
    hotspare(&["resume"]);
    await_status("ready", 1);
    assert!(status()["epoch"].as_u64() > epoch.as_u64());
    assert!(ghost(lab.host(1)) > paused_at);
    lab.host(0).kill().unwrap();
    Engine::taken_over(&spare).unwrap();
    let records = on(lab.host(1), {
        let pid = spare.pid();
        async move || {
            let mut client = by_socket(pid).await;
            client.history(HistoryRequest { newest: 0 }).await.unwrap().into_inner().records
        }
    });
    let failover = records.iter().find(|record| record.event == "failover").expect("a record");
    assert_eq!((&*failover.guest, failover.term), ("sleeper", 2));
    let (words, json) = (&failover.words, &failover.json);
    assert!(words.contains("FAILOVER") && json.contains("detect_ms"), "{failover:?}");
}

#[test]
fn on_the_network_only_those_with_a_certificate_are_answered() {
    let lab = Lab::new(2).unwrap();
    for (directory, host) in [(KEYS, "alpha"), ("/srv/hotspare-lab/others", "stranger")] {
        lab.host(0).run(Command::new(BINARY).args(["keys", directory, host]), HANG).unwrap();
    }
    let at = lab.host(0).socket(PORT);
    let listen = lab.host(0).socket(STREAM_PORT).to_string();
    let mut command = Command::new(BINARY);
    command.args(["spare", "--listen", &listen, "--control", &at.to_string()]);
    let agent = lab.host(0).spawn(command.args(["--keys", KEYS, "--name", "alpha"])).unwrap();
    wait_for_listener(&agent, PORT, HANG).unwrap();
    let outside = |path: &str| lab.host(0).outside(path);
    let ours = Identity::load(&outside(KEYS), "alpha").unwrap();
    let others = Identity::load(&outside("/srv/hotspare-lab/others"), "stranger").unwrap();
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(outside(KEYS).join("ca.crt")).unwrap();
    roots.add(authority).unwrap();
    let mut nameless =
        ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
    nameless.alpn_protocols = vec![b"h2".to_vec()];
    let ask = |tls| on(lab.host(1), async move || status_by_tcp(at, tls).await);
    assert_eq!(ask(Some(ours.client_for(b"h2"))), Ok(agent.pid() as u32));
    let refused = |tls, whom: &str| {
        let answer = ask(tls);
        assert!(answer.is_err(), "{whom} is answered: {answer:?}");
    };
    refused(Some(nameless), "somebody without a certificate");
    refused(Some(others.client_for(b"h2")), "somebody of another authority");
    refused(None, "somebody in plain text");
    // It has not minded.
    assert_eq!(ask(Some(ours.client_for(b"h2"))), Ok(agent.pid() as u32));

    // The commands can ask there, too.
    let words = ["status", "--json", "--at", &at.to_string(), "--keys", KEYS, "--name", "alpha"];
    let copied = lab.host(1).outside(KEYS);
    std::fs::create_dir_all(&copied).unwrap();
    for file in ["ca.crt", "alpha.crt", "alpha.key"] {
        std::fs::copy(outside(KEYS).join(file), copied.join(file)).unwrap();
    }
    let told = lab.host(1).run(Command::new(BINARY).args(words), HANG).unwrap();
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["pid"], agent.pid());
}

/// An agent that was killed leaves its socket behind, one that is stopped does not answer: the
/// others are shown all the same.
#[test]
fn agents_that_do_not_answer_hide_no_others() {
    let lab = Lab::new(1).unwrap();
    let host = lab.host(0);
    let spare = |port: u16| {
        let listen = host.socket(port).to_string();
        let mut command = Command::new(BINARY);
        let process = host.spawn(command.args(["spare", "--listen", &listen])).unwrap();
        wait_for_listener(&process, port, HANG).unwrap();
        process
    };
    let (killed, stopped, well) = (spare(7001), spare(7002), spare(7003));
    let signal = |process: &Process, signal| {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.pid()), signal).unwrap();
    };
    signal(&killed, nix::sys::signal::Signal::SIGKILL);
    killed.wait(HANG).unwrap();
    signal(&stopped, nix::sys::signal::Signal::SIGSTOP);
    let left_behind = host.outside(format!("/run/hotspare/{}.sock", killed.pid()));
    assert!(left_behind.exists());
    let asked = host.spawn(Command::new(BINARY).args(["status", "--json"])).unwrap();
    assert!(asked.wait(HANG).unwrap().success());
    let agents: Vec<serde_json::Value> =
        asked.stdout().text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let pids: Vec<_> = agents.iter().map(|agent| agent["pid"].as_i64().unwrap()).collect();
    assert_eq!(pids, [i64::from(well.pid())]);
    let told = format!("the agent with pid {} has not answered", stopped.pid());
    assert!(asked.stderr().text().contains(&told), "{}", asked.stderr().text());
    assert!(!left_behind.exists(), "the socket of a killed agent is cleared away");
}
