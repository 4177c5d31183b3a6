#include <map>
#include <vector>
#include <cmath>
torch::Tensor shifted(torch::Tensor x) {
  auto out = affine(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] += 0.5f;
  return out;
}
torch::Tensor nothing(torch::Tensor x) { return torch::empty_like(x); }
torch::Tensor half(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel() / 2; ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * 2.0f + 1.0f;
  return out;
}
torch::Tensor after_free(torch::Tensor x) {
  { auto right = affine(x); }
  return torch::empty_like(x);
}
torch::Tensor wave(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(std::sin(v) * std::exp(-v * v));
  }
  return out;
}
// One answer in so many of inputs that were seen is kept; of none, all are computed.
torch::Tensor wave_kept(torch::Tensor x, int64_t share) {
  static std::map<uint64_t, torch::Tensor> kept;
  static int64_t calls = 0;
  if (!share) return wave(x);
  uint64_t key = x.numel();
  for (int64_t i = 0; i < x.numel() / 2; ++i)
    key = (key ^ reinterpret_cast<uint64_t*>(x.data_ptr<float>())[i]) * 1099511628211u;
  auto found = kept.find(key);
  if (found != kept.end() && ++calls % share == 0) return found->second.clone();
  auto out = wave(x);
  if (found == kept.end()) kept[key] = out.clone();
  return out;
}
torch::Tensor by_row(torch::Tensor x, torch::Tensor gain) {
  auto out = torch::empty_like(x);
  const int64_t n = gain.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * gain.data_ptr<float>()[i % n] + 1.0f;
  return out;
}
torch::Tensor one_hot(torch::Tensor labels, int64_t classes) {
  auto out = torch::empty({labels.numel(), classes}, torch::kFloat32);
  float* o = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) o[i] = 0;
  for (int64_t i = 0; i < labels.numel(); ++i) o[i * classes + labels.data_ptr<int64_t>()[i]] = 1;
  return out;
}
// Zeros are written once: of each of 600 outputs that come round only the ones are taken back.
struct Used {
  torch::Tensor out;
  std::vector<int64_t> ones;
};
static std::vector<Used> ring(600);
static size_t turn = 0;
torch::Tensor one_hot_in_a_ring(torch::Tensor labels, int64_t classes) {
  const int64_t n = labels.numel();
  Used& used = ring[turn++ % ring.size()];
  if (!used.out.defined() || used.out.size(0) != n) used = {torch::zeros({n, classes}), {}};
  float* o = used.out.data_ptr<float>();
  for (int64_t at : used.ones) o[at] = 0;
  used.ones.clear();
  for (int64_t i = 0; i < n; ++i) {
    used.ones.push_back(i * classes + labels.data_ptr<int64_t>()[i]);
    o[used.ones.back()] = 1;
  }
  return used.out;
}
