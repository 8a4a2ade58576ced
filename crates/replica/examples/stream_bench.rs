//! How fast pages are encoded and cross the loopback, plain and TLS, and how long an
//! acknowledgement takes: `cargo run --release -p hotspare-replica --example stream_bench`.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use hotspare_image::memory::{MmId, PageOwner};
use hotspare_image::{Epoch, Position, Term};
use hotspare_replica::bases::PAGE;
use hotspare_replica::fuzz::Dice;
use hotspare_replica::pages::{Body, Effort, PAGES_PER_FRAME_MAX, PageDecoder, PageEncoder};
use hotspare_replica::{
    Channel, Compression, Identity, Incoming, PageBatch, PageRun, Receiver, Replier, Security,
    StagingLimits, keys, sender,
};

const OWNER: PageOwner = PageOwner::Mm(MmId(1));

fn quantiles(mut samples: Vec<f64>) -> (f64, f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share) as usize];
    (at(0.5), at(0.99), at(1.0))
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut dice = Dice(1);
    (0..bytes / 8).flat_map(|_| dice.roll().to_le_bytes()).collect()
}

fn text(bytes: usize) -> Vec<u8> {
    let mut dice = Dice(2);
    let line = |n: u64| format!("key:{:012} value:{:016x} flags=0 ttl=-1\n", n % 100_000, n);
    let mut all = Vec::new();
    while all.len() < bytes {
        all.extend_from_slice(line(dice.roll()).as_bytes());
    }
    all.truncate(bytes);
    all
}

/// `fresh`: without memory of pages sent before, so that nothing is sent as a difference.
fn encoding(name: &str, effort: Effort, fresh: bool, mut change: impl FnMut(u64, &mut Vec<u8>)) {
    let rounds = 300;
    let mut bytes = text(PAGES_PER_FRAME_MAX * PAGE);
    let runs = [PageRun { first: 0, pages: PAGES_PER_FRAME_MAX as u32 }];
    let (mut encoder, mut decoder) = (PageEncoder::default(), PageDecoder::default());
    let (mut encode, mut decode, mut size) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        change(round, &mut bytes);
        if fresh {
            (encoder, decoder) = (PageEncoder::default(), PageDecoder::default());
        }
        let mut payload = Vec::with_capacity(2 << 20);
        let start = Instant::now();
        let pages: Vec<&[u8]> = bytes.chunks_exact(PAGE).collect();
        match effort {
            Effort::Squeeze => drop(encoder.squeeze(OWNER, &runs, &pages, &mut payload)),
            Effort::Plain => {
                let mut lines = Vec::new();
                let (_, bodies) = encoder.plain(OWNER, &runs, &pages, &mut payload, &mut lines);
                bodies.iter().for_each(|body| {
                    payload.extend_from_slice(match body {
                        Body::Page(number) => pages[*number],
                        Body::Beside(range) => &lines[range.clone()],
                    });
                });
            }
        }
        encode.push(start.elapsed().as_secs_f64());
        size = payload.len();
        let start = Instant::now();
        let remember = effort == Effort::Squeeze;
        decoder.decode(&payload, remember, |_, _, _| Ok(())).expect("own frame");
        decode.push(start.elapsed().as_secs_f64());
    }
    let rate = |seconds: f64| bytes.len() as f64 / seconds / 1e9;
    let (encode, decode) = (quantiles(encode), quantiles(decode));
    println!(
        "{name:<26} encode {:6.2} GB/s p50 {:6.2} p99   decode {:6.2} p50   size {:4.0} %",
        rate(encode.0),
        rate(encode.1),
        rate(decode.0),
        size as f64 * 100.0 / bytes.len() as f64
    );
}

fn connected(security: &Security) -> (Channel, Channel) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address").to_string();
    thread::scope(|scope| {
        let far = scope.spawn(|| {
            let stream = listener.accept().expect("accept").0;
            Channel::accepted(stream, security).expect("accepted")
        });
        (Channel::connect(&address, security).expect("connect"), far.join().expect("far side"))
    })
}

/// Checkpoints of `pages` pages, `count` times; each is acknowledged before the next.
fn crossing(name: &str, security: &Security, pages: usize, count: u64, compression: Compression) {
    let (near, far) = connected(security);
    let (read, write, _near) = near.split().expect("split");
    let (sender, writer, mut replies) = sender(write, read, 64 << 20, compression);
    let (far_read, far_write, far) = far.split().expect("split");
    let spare = thread::spawn(move || {
        let mut receiver = Receiver::new(far_read, StagingLimits::default());
        let mut replier = Replier::new(far_write);
        while let Ok(Incoming::Checkpoint(checkpoint)) = receiver.next() {
            replier.acknowledge(checkpoint.position()).expect("acknowledge");
        }
    });
    let writing = thread::spawn(move || writer.run());
    let reading = thread::spawn(move || while replies.next().is_ok() {});
    let bytes = noise(pages.min(256) * PAGE);
    let batches: Vec<Arc<PageBatch>> = (0..pages.div_ceil(256))
        .map(|at| {
            let run = PageRun { first: (at << 20) as u64, pages: pages.min(256) as u32 };
            Arc::new(PageBatch::new(OWNER, vec![run], bytes.clone()).expect("a batch"))
        })
        .collect();
    let mut spent = Vec::new();
    for epoch in 1..=count {
        let position = Position::checkpoint(Epoch(epoch));
        let start = Instant::now();
        sender.begin(position, Term(1), false).expect("begin");
        for batch in &batches {
            sender.pages(batch.clone()).expect("pages");
        }
        sender.end(position, None).expect("end");
        sender.wait_committed(position, Duration::from_secs(60)).expect("a commit");
        spent.push(start.elapsed().as_secs_f64());
    }
    let stats = sender.stats();
    drop(sender);
    writing.join().expect("writer").expect("goodbye");
    spare.join().expect("spare");
    far.hang_up();
    reading.join().expect("reader");
    let (p50, p99, max) = quantiles(spent);
    let rate = (pages * PAGE) as f64 / p50 / 1e9;
    println!(
        "{name:<26} {pages:>6} pages  commit {:8.0} µs p50 {:8.0} p99 {:8.0} max  {rate:5.2} GB/s  \
         pages {:?}",
        p50 * 1e6,
        p99 * 1e6,
        max * 1e6,
        stats.pages,
    );
}

fn main() {
    encoding("raw", Effort::Plain, true, |_, _| {});
    encoding("zero", Effort::Plain, false, |_, bytes| bytes.fill(0));
    encoding("lz4, text", Effort::Squeeze, true, |_, _| {});
    let a_little = |round, bytes: &mut Vec<u8>| {
        bytes.chunks_mut(PAGE).for_each(|page| page[128..192].fill(round as u8));
    };
    encoding("lines, 64 B of a page new", Effort::Plain, false, a_little);
    encoding("xor, 64 B of a page new", Effort::Squeeze, false, a_little);
    let noisy = noise(PAGES_PER_FRAME_MAX * PAGE);
    encoding("noise, squeezed in vain", Effort::Squeeze, true, |_, bytes| {
        bytes.copy_from_slice(&noisy);
    });
    if std::env::args().any(|argument| argument == "encode") {
        return;
    }

    let directory = tempfile::tempdir().expect("a directory");
    keys::issue(directory.path(), &["bench".to_owned()]).expect("keys");
    let identity = Identity::load(directory.path(), "bench").expect("keys");
    let plain = Security::Plain { insecure: false };
    let tls = Security::Tls(Arc::new(identity));
    for (name, security) in [("plain", &plain), ("tls", &tls)] {
        crossing(name, security, 0, 5000, Compression::Adaptive);
        crossing(name, security, 200, 2000, Compression::Adaptive);
        crossing(name, security, 4096, 200, Compression::Adaptive);
        crossing(name, security, 65536, 8, Compression::Adaptive);
    }
}
